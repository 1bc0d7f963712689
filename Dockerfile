# One image for the daemon and the mount, which is what its arguments say:
#   docker run -v cachefs:/run/cachefs ... IMAGE                          cachefsd, not as root
#   docker run --user 0 --device /dev/fuse --cap-add SYS_ADMIN ... IMAGE mount.cachefs SPEC DIR -f
# tests/unit/test_packaging.py runs every step below, outside of Docker.

FROM debian:bookworm-slim AS build
# Debian keeps one version of each package per release, so the release is the pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libfuse3-dev pkg-config python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY LICENSE README.md pyproject.toml setup.cfg setup.py ./
COPY cachefs cachefs
COPY daemon daemon
COPY scheduler_plugin scheduler_plugin
COPY tools tools
RUN python3 -m venv /opt/cachefs \
    && /opt/cachefs/bin/pip install --no-cache-dir ".[all]" \
    && /opt/cachefs/bin/pip uninstall --yes setuptools pip

FROM debian:bookworm-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates fuse3 python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/cachefs /opt/cachefs
RUN install -d -o 1000 -g 1000 /etc/cachefs /run/cachefs /var/lib/cachefs
ENV PATH=/opt/cachefs/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
USER 1000:1000
CMD ["cachefsd"]
