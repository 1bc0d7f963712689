"""Small servers that follow the documented HTTP APIs of object stores, as far as cachefs uses them.

They check what the real ones check (signatures, tokens, conditions), know ranges, and list in pages of two. All run in
a thread. `AzureServer` was compared with azurite 3.35, which is too large to be installed for the tests.
"""

import asyncio
import base64
import hashlib
import hmac
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from ssl import SSLContext
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from aiohttp import web

_PAGE = 2
WHEN = 1_700_000_000  # unix time of all objects


@dataclass
class StoreServer:
    """What the servers have in common, seen from the test."""

    endpoint: str = ""  # its URL, once it runs
    objects: dict[str, bytes] = field(default_factory=dict)  # by bucket/key, or container/key
    versions: dict[str, int] = field(default_factory=dict)
    requests: list[web.BaseRequest] = field(default_factory=list)  # so far
    last_version: int = 1000

    def put(self, key: str, data: bytes) -> None:
        """Upload an object. Each upload has another version."""
        self.last_version += 1
        self.objects[key], self.versions[key] = data, self.last_version

    def delete(self, key: str) -> None:
        del self.objects[key]

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        return await self.respond(request)

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        raise NotImplementedError

    def below(self, prefix: str) -> list[str]:
        """The keys that begin so, in order."""
        return sorted(key for key in self.objects if key.startswith(prefix))


def path_of(request: web.BaseRequest) -> str:
    """As it was sent, percent-encoded."""
    return urlsplit(request.raw_path).path


def query_of(request: web.BaseRequest) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(request.raw_path).query, keep_blank_values=True))


def content(request: web.BaseRequest, data: bytes, headers: dict[str, str]) -> web.Response:
    """The object, or the part of it that was asked for."""
    asked = request.headers.get("Range", "")
    if not asked:
        return web.Response(body=data, headers=headers)
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if int(first) >= len(data):
        return web.Response(status=416, headers={"Content-Range": f"bytes */{len(data)}"})
    end = min(int(last), len(data) - 1)
    span = {"Content-Range": f"bytes {first}-{end}/{len(data)}"}
    return web.Response(status=206, body=data[int(first) : end + 1], headers=headers | span)


@dataclass
class GoogleServer(StoreServer):
    """JSON API of Google Cloud Storage."""

    tokens: set[str] = field(default_factory=set)  # that are good; empty: everybody may read
    public_key: bytes = b""  # of the service account that may have tokens
    payer: str = ""  # the project that must be named, where the requester pays

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if path_of(request) == "/token":
            return await self._token(request)
        if self.tokens and request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return web.Response(status=401)
        if self.payer and query_of(request).get("userProject") != self.payer:
            why = "Bucket is a requester pays bucket but no user project provided."
            error = {"code": 400, "message": why, "errors": [{"reason": "required", "message": why}]}
            return web.json_response({"error": error}, status=400)
        parts = path_of(request).removeprefix("/storage/v1/b/").split("/")
        bucket, key = unquote(parts[0]), unquote("/".join(parts[2:]))
        if not self.below(f"{bucket}/"):
            return web.Response(status=404)
        return self._object(request, f"{bucket}/{key}") if key else self._list(request, f"{bucket}/")

    async def _token(self, request: web.BaseRequest) -> web.Response:
        from google.auth import jwt

        form = dict(parse_qsl((await request.read()).decode()))
        claims = jwt.decode(form["assertion"], certs=self.public_key, audience="https://oauth2.googleapis.com/token")
        assert claims["scope"].endswith("devstorage.read_only")
        token = f"token-{len(self.tokens)}"
        self.tokens.add(token)
        return web.json_response({"access_token": token, "expires_in": 3600, "token_type": "Bearer"})

    def _list(self, request: web.BaseRequest, bucket: str) -> web.Response:
        query = query_of(request)
        keys = [key for key in self.below(bucket + query.get("prefix", "")) if key > query.get("pageToken", "")]
        items = [
            {"name": key.removeprefix(bucket), "size": str(len(self.objects[key])),
             "generation": str(self.versions[key]), "updated": "2023-11-14T22:13:20.000Z"}
            for key in keys[:_PAGE]
        ]  # fmt: skip
        page: dict[str, Any] = {"items": items} if items else {}
        return web.json_response(page | ({"nextPageToken": keys[_PAGE - 1]} if len(keys) > _PAGE else {}))

    def _object(self, request: web.BaseRequest, key: str) -> web.Response:
        if key not in self.objects:
            return web.Response(status=404)
        if query_of(request)["ifGenerationMatch"] != str(self.versions[key]):
            return web.Response(status=412)
        data = self.objects[key]
        digest = base64.b64encode(hashlib.md5(data).digest()).decode()
        headers = {"x-goog-generation": str(self.versions[key]), "x-goog-hash": f"crc32c=AAAAAA==,md5={digest}"}
        return content(request, data, headers)


@dataclass
class AzureServer(StoreServer):
    """Blob service of Azure Storage. Its account is in the path, as in emulators."""

    account: str = "someaccount"
    key: bytes = b"0123456789abcdef"
    signature: str = "sv=2021&sig=a%2Fb%3D"  # a shared access signature
    token: str = "identity-token"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT": self.account,
            "AZURE_STORAGE_KEY": base64.b64encode(self.key).decode(),
        }

    @property
    def blobs(self) -> str:
        """URL of the account."""
        return f"{self.endpoint}/{self.account}"

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if path_of(request) == "/identity":  # as App Service offers it
            return web.json_response({"access_token": self.token, "expires_on": 4_000_000_000, "token_type": "Bearer"})
        if not self._is_allowed(request):
            return _azure_error(403, "AuthenticationFailed")
        container, _, key = unquote(path_of(request)).removeprefix(f"/{self.account}/").partition("/")
        if not self.below(f"{container}/"):
            return _azure_error(404, "ContainerNotFound")
        return self._blob(request, f"{container}/{key}") if key else self._list(request, f"{container}/")

    def _is_allowed(self, request: web.BaseRequest) -> bool:
        scheme, _, proof = request.headers.get("Authorization", "").partition(" ")
        if scheme == "SharedKey":
            return hmac.compare_digest(proof, f"{self.account}:{self._signature_of(request)}")
        return (scheme == "Bearer" and proof == self.token) or self.signature in request.raw_path

    def _signature_of(self, request: web.BaseRequest) -> str:
        names = ["Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date",
                 "If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"]  # fmt: skip
        text = "".join(f"{line}\n" for line in [request.method, *(request.headers.get(name, "") for name in names)])
        own = sorted((name.lower(), value) for name, value in request.headers.items() if name.lower()[:5] == "x-ms-")
        text += "".join(f"{name}:{value}\n" for name, value in own)
        text += f"/{self.account}{path_of(request)}"
        text += "".join(f"\n{name}:{value}" for name, value in sorted(query_of(request).items()))
        return base64.b64encode(hmac.digest(self.key, text.encode(), "sha256")).decode()

    def _list(self, request: web.BaseRequest, container: str) -> web.Response:
        query = query_of(request)
        keys = [key for key in self.below(container + query["prefix"]) if key > query.get("marker", "")]
        blobs = "".join(self._listed(key, key.removeprefix(container)) for key in keys[:_PAGE])
        marker = escape(keys[_PAGE - 1]) if len(keys) > _PAGE else ""
        text = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"
        return web.Response(
            body=f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode(), content_type="application/xml"
        )

    def _listed(self, key: str, name: str) -> str:
        encoded = any(character < " " for character in name)
        shown = f'<Name Encoded="true">{quote(name)}</Name>' if encoded else f"<Name>{escape(name)}</Name>"
        return (
            f"<Blob>{shown}<Properties><Last-Modified>{formatdate(WHEN, usegmt=True)}</Last-Modified>"
            f"<Etag>0x{self.versions[key]:X}</Etag><Content-Length>{len(self.objects[key])}</Content-Length>"
            "</Properties></Blob>"
        )

    def _blob(self, request: web.BaseRequest, key: str) -> web.Response:
        if key not in self.objects:
            return _azure_error(404, "BlobNotFound")
        etag = f'"0x{self.versions[key]:X}"'
        if request.headers["If-Match"] != etag:
            return _azure_error(412, "ConditionNotMet")
        data = self.objects[key]
        name = "x-ms-blob-content-md5" if "Range" in request.headers else "Content-MD5"
        return content(request, data, {"ETag": etag, name: base64.b64encode(hashlib.md5(data).digest()).decode()})


def _azure_error(status: int, code: str) -> web.Response:
    return web.Response(status=status, headers={"x-ms-error-code": code})


@dataclass
class FilesServer(StoreServer):
    """Files without any check, as a content delivery network has them. Credentials must not come here."""

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        assert "Authorization" not in request.headers
        key = unquote(path_of(request)).removeprefix("/")
        if key not in self.objects:
            return web.Response(status=404)
        return content(request, self.objects[key], {"ETag": f'"another {self.versions[key]}"'})


@dataclass
class HubServer(StoreServer):
    """The Hugging Face hub with one repository, `datasets/team/set`. Keys are commit/path."""

    far: FilesServer = field(default_factory=FilesServer)  # where large files are
    large: int = 100  # bytes from which a file is large
    token: str = ""  # that may read; empty: everybody may
    gated: bool = False  # a token is not enough
    main: str = ""  # the last commit
    references: tuple[str, ...] = ("main", "refs/convert/parquet", "refs/pr/3", "feature/new")  # that mean it

    def commit(self, files: dict[str, bytes]) -> str:
        """Replace all files. Returns the name of the commit."""
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        for path, data in files.items():
            self.put(f"{name}/{path}", data)
            if len(data) >= self.large:
                self.far.put(hashlib.sha256(data).hexdigest(), data)
        self.main = name
        return name

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _hub_error(401, "RepoNotFound")
        if self.gated:
            return _hub_error(403, "GatedRepo")
        path = unquote(path_of(request))
        if path.startswith("/api/datasets/team/set/revision/"):
            return self._revision(path.removeprefix("/api/datasets/team/set/revision/"))
        if path.startswith("/api/datasets/team/set/tree/"):
            return self._tree(request, path.removeprefix("/api/datasets/team/set/tree/"))
        if path.startswith("/datasets/team/set/resolve/"):
            return self._resolve(request, path.removeprefix("/datasets/team/set/resolve/"))
        return _hub_error(401, "RepoNotFound")  # the hub does not say that there is none

    def _revision(self, revision: str) -> web.Response:
        commit = self.main if revision in self.references else revision
        if not self.below(f"{commit}/"):
            return _hub_error(404, "RevisionNotFound")
        return web.json_response({"sha": commit, "lastModified": "2023-11-14T22:13:20.000Z"})

    def _tree(self, request: web.BaseRequest, place: str) -> web.Response:
        after = query_of(request).get("cursor", "")
        keys = [key for key in self.below(f"{place}/") if key > after]
        items: list[dict[str, Any]] = []
        for key in keys[:_PAGE]:
            data, path = self.objects[key], key.partition("/")[2]
            item = {"type": "file", "path": path, "oid": _git_hash(data), "size": len(data)}
            if len(data) >= self.large:
                item["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            items.append(item)
        headers = {}
        if len(keys) > _PAGE:
            more = f"{path_of(request)}?recursive=true&cursor={quote(keys[_PAGE - 1], safe='')}"
            headers["Link"] = f'<{self.endpoint}{more}>; rel="next"'
        return web.json_response(items, headers=headers)

    def _resolve(self, request: web.BaseRequest, key: str) -> web.Response:
        if key not in self.objects:
            return _hub_error(404, "EntryNotFound")
        data = self.objects[key]
        if len(data) < self.large:
            return content(request, data, {"ETag": f'"{_git_hash(data)}"'})
        oid = hashlib.sha256(data).hexdigest()
        where = {"Location": f"{self.far.endpoint}/{oid}", "X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data))}
        return web.Response(status=302, headers=where)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _hub_error(status: int, code: str) -> web.Response:
    return web.Response(status=status, headers={"X-Error-Code": code})


@contextmanager
def running(*servers: StoreServer, tls: SSLContext | None = None) -> Iterator[None]:
    """The servers run, each on a loopback port of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="stores", daemon=True)
    thread.start()

    async def start(server: StoreServer) -> web.ServerRunner:
        runner = web.ServerRunner(web.Server(server.answer))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        server.endpoint = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
        return runner

    runners = [asyncio.run_coroutine_threadsafe(start(server), loop).result(10) for server in servers]
    try:
        yield
    finally:
        for runner in runners:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
