"""The web page in a real browser: what it shows, to whom, and that it cannot do more. It also makes the pictures of the
documentation: `make screenshots`."""

import http.client
import io
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from cachefs.job_messages import JobPublication
from cachefs.rpc import JOB_PUBLISH
from cachefs_bench.lab.ports import free_port, free_ports
from cachefs_daemon.datasets import records
from cachefs_daemon.datasets.records import Registry
from tests import web_scene
from tests.as_user import NOBODY, as_user, public_directory
from tests.daemon import Daemon
from tests.servers import browser as browsers
from tests.servers.browser import PATIENCE, Browser, Scheme
from tests.waiting import until
from tests.web_scene import MARKUP, Scene, Work

# Directory for the pictures. Without it none is kept, and jobs read more slowly.
PICTURES = "WEB_SCREENSHOTS"
QUICK = 1.0 if PICTURES in os.environ else 0.1
RESNET = Work("resnet50-seed1", "imagenet", 600, 30.0 * QUICK)
CAPTIONS = Work("caption-finetune", "captions", 300, 12.0 * QUICK, 4)
MOST_PICTURE_BYTES = 150_000

expect.set_options(timeout=PATIENCE)

# The contrast of each text with what is behind it, by WCAG 2; returns those below 4.5.
POOR_CONTRAST = """() => {
  const channel = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(one).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.matches(".unseen, .skip, :disabled")) continue;
    const [one, other] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < 4.5) found.push(`${contrast.toFixed(2)}: ${element.textContent.trim().slice(0, 40)}`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsers.running() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_to_complain_of(chromium: Browser) -> Iterator[None]:
    """Neither scripts nor the policy for content have anything to say of any page."""
    chromium.complaints.clear()
    yield
    assert chromium.complaints == []


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    home = tmp_path_factory.mktemp("w")
    with web_scene.scene(home) as running:
        web_scene.fail(running, home)
        web_scene.warm(running, "speech")
        running.begin(CAPTIONS)
        running.begin(RESNET)
        yield running


def place(scene: Scene) -> str:
    return f"{scene.url}#job={RESNET.job}&dataset=imagenet"


def live(page: Page) -> Page:
    expect(page.locator("#link")).to_have_text("Live")
    return page


def asked(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def told(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{path}", timeout=60) as answer:
        return json.loads(answer.read())


def until_read(scene: Scene, job: str) -> None:
    """The job has a history with something in it."""
    until(lambda: any(told(scene.port, f"job?name={job}")["history"].get("samples", [])[2:]))


# --- who is answered, and with what -----------------------------------------------------------------------------------


def test_only_this_machine_reads_and_nobody_writes(scene: Scene) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = asked(scene.port, "/api/overview", method)
        assert (status, headers["Allow"]) == (405, "GET,HEAD")
    for path in ("/", "/page.js", "/api/overview", "/api/job?name=none"):
        assert asked(scene.port, path, Host="evil.example")[0] == 403
        _, headers, _ = asked(scene.port, path, "HEAD", Origin="http://evil.example")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert not [name for name in headers if name.startswith("Access-Control")]
    assert asked(scene.port, "/api/overview", Cookie="x" * 20_000)[0] == 400
    status, headers, _ = asked(scene.port, "/page.js")
    assert asked(scene.port, "/page.js", **{"If-None-Match": headers["ETag"]})[0] == 304
    assert asked(scene.port, "/api/job?name=none")[0] == asked(scene.port, "/api/dataset?name=")[0] == 404
    assert asked(scene.port, "/%2e%2e/page.py")[0] == 404


def test_a_job_is_told_field_by_field(scene: Scene) -> None:
    """A new field of JobView, which others may not be meant to see, does not get here by itself."""
    detail = told(scene.port, f"job?name={RESNET.job}")
    assert set(detail) == {"job", "period", "history", "ranks", "all_ranks"}
    assert set(detail["job"]) == {
        "id", "name", "owner", "dataset", "state", "reason", "started", "ranks", "epoch", "part", "left", "rate",
        "waited", "fetched", "from_peers", "troubles", "loop_waited", "advice", "shares",
    }  # fmt: skip
    assert set(detail["ranks"][0]) == {
        "rank", "loader", "state", "problem", "epoch", "read", "length", "rate", "waits", "waited", "longest",
        "sources",
    }  # fmt: skip


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_node_job_dataset_and_errors_are_shown(scene: Scene, chromium: Browser) -> None:
    until_read(scene, RESNET.job)
    with chromium.page(place(scene)) as page:
        live(page)
        assert page.locator("#tiers b").all_text_contents() == ["Memory", "SSD", "Page cache"]
        jobs = page.get_by_role("table", name="Jobs of this node")
        assert set(jobs.locator("tbody tr th").all_text_contents()) == {RESNET.job, CAPTIONS.job}
        expect(page.locator("#job-title")).to_have_text(RESNET.job)
        expect(page.locator("#job-about")).to_contain_text("imagenet; began ")
        expect(page.get_by_role("img", name="Fetched, from origins and other nodes: from ")).to_be_visible()
        assert page.locator(".lane .line.origin").get_attribute("d")
        page.get_by_text("Over time, as a table").click()
        assert 1 <= page.locator("#timeline-table tbody tr").count() <= 25
        assert set(page.locator("#ranks-table tbody tr th").all_text_contents()) == {"0", "1"}
        expect(page.locator("#dataset-about")).to_contain_text("600 files")
        assert page.locator("#cells i").count() == 256
        assert "of imagenet is on this node" in (page.locator("#cells").get_attribute("aria-label") or "")
        page.get_by_text("The map, as a table").click()
        assert page.locator("#map-table tbody tr").count() == 16
        expect(page.locator("#cluster")).to_be_hidden()


def test_names_are_texts(scene: Scene, chromium: Browser) -> None:
    with chromium.page(scene.url) as page:
        page.on("dialog", lambda dialog: pytest.fail(f"a name has run: {dialog.message}"))
        live(page)
        expect(page.locator("#errors-table")).to_contain_text(MARKUP)
        page.goto(f"{scene.url}#job={MARKUP}&dataset={MARKUP}")
        page.reload()
        live(page)
        assert page.locator("script").count() == 1
        assert page.locator("main img").count() == 0
    assert [one for one in chromium.complaints if "404 (Not Found)" not in one] == [], "there is no job of that name"
    chromium.complaints.clear()


def test_the_browser_runs_no_other_scripts(scene: Scene, chromium: Browser) -> None:
    with chromium.page(scene.url) as page:
        live(page)
        page.evaluate("""() => { const one = document.createElement("script");
            one.textContent = "window.ran = true"; document.body.append(one); }""")
        assert page.evaluate("window.ran") is None
        assert "Content Security Policy" in chromium.complaints.pop()
        assert chromium.complaints == []


def test_a_map_is_drawn_of_what_is_there(scene: Scene, chromium: Browser) -> None:
    with chromium.page(f"{scene.url}#dataset=speech") as page:
        live(page)
        expect(page.locator("#dataset-title")).to_have_text("speech")
        expect(page.locator("#map-title")).to_contain_text("block by block")
        assert page.locator("#cells i").count() == 120
        expect(page.locator("#map-legend li").last).to_contain_text("Not here 0 %")
        page.get_by_role("link", name="cold-storage").click()
        expect(page.locator("#map-none")).to_contain_text("cachectl warmup cold-storage")


# --- for everybody ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable(scene: Scene, chromium: Browser, scheme: Scheme) -> None:
    with chromium.page(place(scene), color_scheme=scheme) as page:
        live(page)
        lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert (int(lightness) > 128) == (scheme == "light")
        assert page.evaluate(POOR_CONTRAST) == []


def test_it_fits_a_phone(scene: Scene, chromium: Browser) -> None:
    with chromium.page(place(scene), width=360, height=740, touch=True) as page:
        live(page)
        assert page.evaluate("matchMedia('(pointer: coarse)').matches")
        expect(page.locator("#errors-table")).to_contain_text(MARKUP)
        for details in page.locator("summary").all():
            details.click()
        wide = """() => [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility()
            && !one.closest(".unseen, svg") && one.getBoundingClientRect().right > 360.5).map((one) => one.outerHTML)"""
        # What is drawn while figures come in may be wider for a moment.
        width = "document.documentElement.scrollWidth"
        until(lambda: page.evaluate(width) == 360, lambda: page.evaluate(wide), seconds=10)
        assert page.evaluate(wide) == []


def test_the_keyboard_is_enough(scene: Scene, chromium: Browser) -> None:
    with chromium.page(scene.url) as page:
        live(page)
        focused = "document.activeElement.id || document.activeElement.textContent"
        order = []
        for _ in range(40):
            page.keyboard.press("Tab")
            order.append(page.evaluate(focused))
            if order[-1] == "speech":
                break
        wanted = ["Skip to jobs", CAPTIONS.job, "moment", "Over time, as a table", "imagenet", "speech"]
        assert [order.index(one) for one in wanted] == sorted(order.index(one) for one in wanted)
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid"
        page.get_by_role("link", name=RESNET.job).focus()
        page.keyboard.press("Enter")
        expect(page.locator("#job-title")).to_be_focused()
        expect(page.locator("#job-title")).to_have_text(RESNET.job)
        slider = page.get_by_role("slider", name="Moment")
        slider.focus()
        before = slider.get_attribute("aria-valuetext")
        page.keyboard.press("Home")
        assert slider.get_attribute("aria-valuetext") != before
        assert "Reads waiting" in (slider.get_attribute("aria-valuetext") or "")
        page.wait_for_timeout(5000)  # two refreshes take neither the focus nor the moment
        expect(slider).to_be_focused()
        assert slider.input_value() == "0"


def test_everything_has_a_name(scene: Scene, chromium: Browser) -> None:
    with chromium.page(place(scene)) as page:
        live(page)
        expect(page.locator("#cells i").first).to_be_visible()
        tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")
        nodes = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree["nodes"]
            if not node["ignored"]
        ]
        roles = {role for role, _ in nodes}
        named = {"link", "slider", "table", "image", "img", "region", "heading", "columnheader", "rowheader", "article"}
        assert {"link", "slider", "table", "region", "heading", "columnheader", "rowheader", "banner", "main"} <= roles
        assert [one for one in nodes if one[0] in named and not one[1].strip()] == []
        assert page.locator("[aria-live], [role=status], [role=alert]").count() == 1, "one thing is said aloud"


# --- over time --------------------------------------------------------------------------------------------------------


def test_an_ended_job_stays_as_it_was(scene: Scene, chromium: Browser) -> None:
    short = Work("short-run", "cold-storage", 400, 200.0, 1)
    scene.begin(short)
    until_read(scene, short.job)
    scene.end(short)
    with chromium.page(f"{scene.url}#job={short.job}") as page:
        live(page)
        expect(page.locator("#job-about")).to_contain_text(", ended")
        rows = len(told(scene.port, f"job?name={short.job}")["history"]["when"])
        page.wait_for_timeout(2500)
        assert len(told(scene.port, f"job?name={short.job}")["history"]["when"]) == rows


@pytest.mark.soak
def test_pictures_for_the_documentation(scene: Scene, chromium: Browser, tmp_path: Path) -> None:
    directory, are_kept = Path(os.environ.get(PICTURES, tmp_path)), PICTURES in os.environ
    pause = 3000 if are_kept else 0  # rates of the node are of some seconds
    if are_kept:
        until(lambda: told(scene.port, f"job?name={RESNET.job}")["history"].get("epoch", [0])[-1] >= 3)
    with chromium.page(place(scene)) as page:
        live(page)
        expect(page.locator("#cells i").first).to_be_visible()
        page.wait_for_timeout(pause)
        _picture(page.screenshot(), directory / "web-page.png")
        for part in ("job", "dataset"):
            box = page.locator(f"#{part}").bounding_box()
            assert box is not None
            clip = {"x": box["x"] - 16, "y": box["y"] + 1, "width": box["width"] + 32, "height": box["height"] + 15}
            _picture(page.screenshot(full_page=True, clip=clip), directory / f"web-{part}.png")
    with chromium.page(place(scene), color_scheme="dark") as page:
        live(page)
        page.wait_for_timeout(pause)
        _picture(page.screenshot(), directory / "web-dark.png")
    with chromium.page(place(scene), width=360, height=1100) as page:
        live(page)
        page.wait_for_timeout(pause)
        _picture(page.screenshot(), directory / "web-phone.png")
    sizes = {path.name: path.stat().st_size for path in sorted(directory.glob("web-*.png"))}
    assert len(sizes) == 5
    assert max(sizes.values()) < MOST_PICTURE_BYTES, sizes


def _picture(png: bytes, path: Path) -> None:
    """With 256 colours, which is half of the bytes."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(256)
    image.save(path, optimize=True)


def test_the_page_outlives_its_daemon(scene: Scene, chromium: Browser) -> None:
    with chromium.page(scene.url) as page:
        live(page)
        scene.daemon.stop()
        expect(page.locator("#link")).to_contain_text("No answer since")
        assert page.locator("#jobs-table tbody tr").count() > 0, "what was there is still to be read"
        scene.daemon.start()
        live(page)
    assert all("ERR_CONNECTION_REFUSED" in one or "ERR_CONNECTION_RESET" in one for one in chromium.complaints)
    chromium.complaints.clear()


# --- nothing, and very much -------------------------------------------------------------------------------------------


PUBLISH = """
import sys
from pathlib import Path
from cachefs.job_messages import JobPublication
from cachefs.rpc import JOB_PUBLISH, DaemonClient
_, socket, job, dataset = sys.argv
DaemonClient(Path(socket)).call(JOB_PUBLISH, JobPublication(job=job, dataset=dataset, lease=600))
"""


def test_a_node_without_anything_says_what_to_do_and_shows_long_names(tmp_path: Path, chromium: Browser) -> None:
    port, job, dataset = free_port(), "j" * 128, "d" * 64
    sections = {"web": {"listen": f"127.0.0.1:{port}"}, "metrics": {"listen": f"127.0.0.1:{port}"}}
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "file").write_bytes(bytes(100))
    with (
        public_directory() as home,
        Daemon(home / "node", sections) as daemon,
        chromium.page(f"http://127.0.0.1:{port}/", width=360) as page,
    ):
        live(page)
        expect(page.locator("#jobs-none")).to_contain_text("cachefs run python train.py")
        expect(page.locator("#datasets-none")).to_contain_text("cachectl dataset add NAME")
        expect(page.locator("#errors-none")).to_be_visible()
        for table in ("jobs", "datasets", "errors"):
            expect(page.locator(f"#{table}-table")).to_be_hidden()
        assert b"cachefs_build_info" in asked(port, "/metrics")[2], "both have one port"

        daemon.add_dataset(dataset, f"file://{tmp_path}/origin")
        command = [*as_user(NOBODY), sys.executable, "-c", PUBLISH, str(daemon.socket), job, dataset]
        subprocess.run(command, check=True, timeout=60)
        page.reload()
        live(page)
        expect(page.locator("#jobs-table")).to_contain_text(f"user {NOBODY}")
        expect(page.locator("#job-title")).to_have_text(f"{job} of user {NOBODY}")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_cluster_is_shown_and_a_node_that_goes_away(tmp_path: Path, chromium: Browser) -> None:
    port = free_port()
    ports = [free_ports(2)[0] for _ in range(2)]
    nodes = [f"{name}=127.0.0.1:{one}" for name, one in zip("ab", ports, strict=True)]
    daemons = [
        Daemon(
            tmp_path / name,
            {
                "cluster": {"membership": "static", "name": name, "listen": f"127.0.0.1:{one}", "nodes": nodes},
                "web": {"listen": f"127.0.0.1:{port}" if name == "a" else ""},
            },
        )
        for name, one in zip("ab", ports, strict=True)
    ]
    with daemons[0], daemons[1] as other, chromium.page(f"http://127.0.0.1:{port}/", width=360) as page:
        live(page)
        table = page.get_by_role("table", name="Nodes of the cluster")
        expect(table.locator("tbody tr th")).to_have_text(["a (this node)", "b"])
        expect(page.locator("#cluster-about")).to_contain_text("2 active")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        other.kill9()
        expect(table.locator("tbody tr").last).to_contain_text("away")


@pytest.mark.soak
def test_a_thousand_datasets_and_64_jobs(tmp_path: Path, chromium: Browser) -> None:
    port = free_port()
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "file").write_bytes(bytes(100))
    with Daemon(tmp_path / "node", {"web": {"listen": f"127.0.0.1:{port}"}}) as daemon:
        daemon.add_dataset("d", f"file://{tmp_path}/origin")
        daemon.stop()
        state = daemon.home / "state"
        (one,) = records.load(state).datasets
        many = [one, *(records.DatasetRecord(f"d{n}", one.url, one.options, one.snapshots) for n in range(999))]
        records.save(state, Registry(datasets=many))
        daemon.start()
        for number in range(64):
            request = JobPublication(job=f"job-{number}", dataset=f"d{number}", lease=600, source="test")
            daemon.client.call(JOB_PUBLISH, request)
        jobs = told(port, "jobs?page=1")
        assert (len(jobs["rows"]), jobs["pages"], jobs["total"]) == (20, 4, 64)
        assert told(port, "datasets?page=99999")["page"] == 49
        assert [len(told(port, f"{path}?page=x")["rows"]) for path in ("jobs", "datasets")] == [20, 20]
        for path in ("overview", "jobs", "datasets", "job?name=job-1", "dataset?name=d1"):
            assert len(asked(port, f"/api/{path}")[2]) < 20_000
        with chromium.page(f"http://127.0.0.1:{port}/") as page:
            live(page)
            page.get_by_role("navigation", name="Pages of jobs").get_by_text("Later").click()
            expect(page.locator("#jobs-pager")).to_contain_text("Page 2 of 4, 64 in all")
            page.get_by_label("Find by name").fill("D77")
            expect(page.locator("#found")).to_have_text("11 found")
            assert page.locator("#datasets-table tbody tr").count() == 11
            page.get_by_label("Find by name").fill("none of that name")
            expect(page.locator("#datasets-table")).to_be_hidden()
