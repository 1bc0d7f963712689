// The page of one node. It asks the daemon every two seconds while somebody looks, and changes nothing.
// Texts of the daemon are put in as text, never as markup.

const EVERY = 2000; // ms between two questions
const LONGEST_PAUSE = 15000; // ms, while the daemon does not answer
const TIMEOUT = 10000; // ms for one answer
const RATE_SECONDS = 10; // over which rates of the node are taken
const TABLE_ROWS = 24; // of a chart as a table
const MAP_EVERY = 5000; // ms between two questions for a map of parts
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);
const chosen = { job: "", dataset: "" }; // what is looked at; empty: nothing yet
const pages = { jobs: 0, datasets: 0 };
const seen = []; // overviews of the last seconds, oldest first
let shown = null; // the job that is drawn
let lastMap = 0; // ms when a map was asked for
let failures = 0;
let timer = 0;

// --- texts -----------------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat("en", { day: "numeric", month: "short", year: "numeric" });

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit && bytes < 99.95 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}
const speed = (bytes) => `${size(bytes)}/s`;
const number = (value) => { // what is more than nothing is never 0.0
  if (!value || value >= 10) return whole.format(Math.round(value));
  return value < 0.1 ? value.toPrecision(1) : value.toFixed(1);
};
function percent(part) { // only what is whole is 100 %
  if (part > 0 && part < 0.005) return "< 1 %";
  return `${part < 1 ? Math.min(99, Math.round(part * 100)) : 100} %`;
}
const plural = (count, word, words = `${word}s`) => `${whole.format(count)} ${count === 1 ? word : words}`;

function span(seconds) {
  if (seconds < 0.0005) return "0 s";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 99.5) return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.round(seconds / 3600);
  return hours < 72 ? `${hours} h` : `${Math.round(seconds / 86400)} days`;
}
const at = (unix) => clock.format(unix * 1000);
const owner = (job) => (job.owner && job.owner !== "control" ? `user ${job.owner}` : "");

// --- elements --------------------------------------------------------------------------------------------------------

function make(tag, options = {}, ...children) {
  const { space, ...attributes } = options;
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function say(element, text) { // an element that stays as it is keeps what somebody has marked in it
  if (element.textContent !== text) element.textContent = text;
}
const show = (id, visible) => { $(id).hidden = !visible; };

/* Makes the children of *parent* one per item, and fills each. Those that are there already stay, and so does the
   focus: *key* says which item is which. */
function list(parent, items, key, create, fill) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const after = items.map((item, place) => {
    const name = String(key(item, place));
    const child = before.get(name) ?? create(item);
    child.dataset.key = name;
    before.delete(name);
    fill(child, item);
    return child;
  });
  before.forEach((child) => child.remove());
  after.forEach((child, place) => { if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null); });
}

/* Rows of a table, whose columns are as its head has them. *cells* gives texts, elements, or functions that fill. */
function rows(id, items, key, cells) {
  const columns = [...$(id).querySelectorAll("thead th")].map((head) => head.className);
  const create = () => make("tr", {}, ...columns.map((kind, place) =>
    (place ? make("td", { class: kind }) : make("th", { scope: "row", class: kind }))));
  list($(id).tBodies[0], items, key, create, (row, item) => cells(item, row).forEach((cell, place) => {
    if (typeof cell === "function") cell(row.children[place]);
    else say(row.children[place], cell);
  }));
}
const link = (text, kind, name) => (cell) => {
  const anchor = cell.firstElementChild ?? cell.appendChild(make("a"));
  const other = new URLSearchParams({ ...chosen, [kind]: name });
  anchor.setAttribute("href", `#${other}`);
  anchor.dataset.kind = kind;
  if (chosen[kind] === name) anchor.setAttribute("aria-current", "true");
  else anchor.removeAttribute("aria-current");
  say(anchor, text);
  cell.parentElement.classList.toggle("chosen", chosen[kind] === name);
};
const lines = (text, more, warns = false) => (cell) => {
  if (!cell.firstElementChild) cell.append(make("span"), make("small"));
  say(cell.firstElementChild, text);
  say(cell.lastElementChild, more);
  cell.firstElementChild.className = warns ? "bad" : "";
};
const bar = (text, part, kind, more = "") => (cell) => {
  if (!cell.firstElementChild) {
    cell.append(make("span"), make("div", { class: "bar", "aria-hidden": "true" }, make("i", { class: kind })), make("small"));
  }
  const [label, track, small] = cell.children;
  say(label, text);
  say(small, more);
  track.firstElementChild.style.width = `${100 * Math.min(1, Math.max(0, part))}%`;
};

// --- this node -------------------------------------------------------------------------------------------------------

const TIER_WORDS = { memory: "Memory", ssd: "SSD", "page cache": "Page cache" };

function showOverview(view) {
  if (seen.length && seen[0].instance !== view.instance) seen.length = 0; // another daemon counts from 0
  seen.push(view);
  while (seen.length > 1 && view.now - seen[0].now > RATE_SECONDS) seen.shift();
  say($("node-name"), view.name);
  document.title = `${view.name} · cachefs`;
  say($("about"), `cachefs ${view.version}, up ${span(view.now - view.began)}`);
  list($("notes"), notes(view), (_, place) => place, () => make("li"), say);
  list($("tiers"), view.tiers, (tier) => tier.name, tierCard, fillTier);
  list($("facts"), facts(view), ([name]) => name, () => make("div", {}, make("dt"), make("dd"), make("dd")), (box, fact) =>
    fact.forEach((text, place) => say(box.children[place], text)));
  showCluster(view.cluster);
  show("errors-none", !view.errors.length);
  show("errors-table", view.errors.length);
  rows("errors-table", view.errors, (one) => one.subject, (one) =>
    [at(one.when), whole.format(one.count), lines(one.message, one.message.includes(one.subject.replace(/^file:\/\//, "")) ? "" : one.subject)]);
}

function notes(view) {
  const found = [...view.troubles];
  if (view.dead_mounts) found.push(`${plural(view.dead_mounts, "mount is", "mounts are")} dead; cachectl mounts shows where.`);
  if (view.lost_datasets) found.push(`${plural(view.lost_datasets, "dataset has", "datasets have")} lost the snapshot; cachectl dataset refresh makes it anew.`);
  if (view.cluster?.problem) found.push(`Cluster: ${view.cluster.problem}`);
  return found;
}

function tierCard() {
  const track = make("div", { class: "bar", "aria-hidden": "true" }, make("i"));
  return make("li", {}, make("div", { class: "name" }, make("b"), make("span")), track, make("span", { class: "about" }));
}
function fillTier(card, tier) {
  const [name, track, about] = card.children;
  const room = Math.max(1, tier.limit);
  say(name.firstChild, TIER_WORDS[tier.name] ?? tier.name);
  say(name.lastChild, `${size(tier.used)} of ${size(tier.limit)}`);
  track.firstChild.className = { ssd: "ssd", "page cache": "pages" }[tier.name] ?? "";
  track.firstChild.style.width = `${100 * Math.min(1, tier.used / room)}%`;
  const short = tier.limit < 0.95 * tier.budget ? `; ${size(tier.budget)} are configured, and there is no room for them` : "";
  const what = tier.blocks === null ? "pushed and not read yet" : `${plural(tier.blocks, "block")}, ${tier.policy}`;
  say(about, `${percent(tier.used / room)} full, ${what}${short}`);
}

function facts(view) {
  const [first, now] = [seen[0], view.totals];
  const seconds = Math.max(view.now - first.now, 0.001);
  const rate = (name) => (seen.length > 1 ? Math.max(0, now[name] - first.totals[name]) / seconds : 0);
  const reads = now.hits + now.misses;
  const found = [
    ["From origins", speed(rate("origin_bytes")), `${size(now.origin_bytes)}, ${plural(now.requests, "request")}, ${whole.format(now.failed)} failed`],
    ["Pushed ahead of reads", speed(rate("pushed_bytes")), `${size(now.pushed_bytes)} in all`],
    ["Reads waiting at mounts", number(rate("waited")), `${span(now.waited)} waited in all`],
    ["Answered from tiers", reads ? percent(now.hits / reads) : "none", `of ${plural(reads, "read")} that reached mounts`],
    ["Mounts", whole.format(view.mounts), `${plural(view.datasets, "dataset")}, ${plural(view.jobs.running ?? 0, "job")} running`],
  ];
  if (view.cluster) found.splice(1, 0, ["From other nodes", speed(rate("peer_bytes")), `${size(now.peer_bytes)}; given ${size(now.served_bytes)}`]);
  for (const [place, one] of view.warmups.entries()) {
    const about = `${size(one.bytes)} of ${size(one.total)}${one.cluster ? " on all nodes" : ""}${one.reason ? `; ${one.reason}` : ""}`;
    found.push([`Warmup ${place + 1}: ${one.dataset}`, one.total ? percent(one.bytes / one.total) : "0 %", about]);
  }
  return found;
}

function showCluster(cluster) {
  show("cluster", cluster);
  if (!cluster) return;
  const states = Object.entries(cluster.states).map(([state, count]) => `${whole.format(count)} ${state}`);
  const count = Object.values(cluster.states).reduce((sum, one) => sum + one, 0);
  const more = count > cluster.members.length ? `; the first ${cluster.members.length} are shown` : "";
  say($("cluster-about"), `${cluster.name}, by ${cluster.source}: ${states.join(", ")}${more}`);
  rows("cluster-table", cluster.members, (one) => one.name, (one) => [
    one.is_me ? `${one.name} (this node)` : one.name,
    lines(one.state, one.is_cooling ? "does not answer" : "", one.state === "away" || one.is_cooling), one.zone || "none",
    percent(one.share), size(one.capacity), one.is_me ? "" : size(one.received), one.is_me ? "" : size(one.given)]);
}

// --- lists -----------------------------------------------------------------------------------------------------------

function showPager(kind, page) {
  const pager = $(`${kind}-pager`);
  show(`${kind}-pager`, page.pages > 1);
  if (!pager.firstChild) {
    for (const [text, step] of [["Earlier", -1], ["Later", 1]]) {
      const button = make("button", { type: "button" }, text);
      button.addEventListener("click", () => { pages[kind] += step; refresh(); });
      pager.append(button);
    }
    pager.insertBefore(make("span"), pager.lastChild);
  }
  pages[kind] = page.page;
  const [earlier, where, later] = pager.children;
  [earlier.disabled, later.disabled] = [page.page === 0, page.page >= page.pages - 1];
  say(where, `Page ${page.page + 1} of ${page.pages}, ${whole.format(page.total)} in all`);
}

/* Epochs are counted from 0 by the daemon, and from 1 for people, as in cachectl. */
function epochName(epoch) {
  return epoch === null ? "" : whole.format(epoch + 1);
}

function epochCell(job) {
  if (job.state !== "running" || job.epoch === null) return "";
  const left = job.left === null ? "" : `${span(Math.max(1, job.left))} left of the epoch`;
  return job.part === null ? epochName(job.epoch) : bar(`${epochName(job.epoch)}, ${percent(job.part)}`, job.part, "epoch", left);
}

function showJobs(page) {
  if (!chosen.job && page.rows.length) chosen.job = page.rows[0].id;
  show("jobs-none", !page.total);
  show("jobs-table", page.total);
  showPager("jobs", page);
  rows("jobs-table", page.rows, (job) => `${job.id} ${job.state === "running"}`, (job) => [
    link(job.name, "job", job.id), job.dataset, lines(job.state, owner(job)), epochCell(job), whole.format(job.ranks),
    job.state === "running" ? number(job.rate) : "",
    lines(job.loop_waited === null ? "" : percent(job.loop_waited), job.troubles.length ? "see below" : "", job.troubles.length > 0), size(job.fetched + job.from_peers)]);
}

function showDatasets(page) {
  if (!chosen.dataset && page.rows.length) chosen.dataset = page.rows[0].name;
  const searched = $("match").value !== "";
  show("datasets-none", !page.total && !searched);
  show("datasets-table", page.total);
  show("search", page.pages > 1 || searched);
  say($("found"), searched ? `${whole.format(page.total)} found` : "");
  showPager("datasets", page);
  rows("datasets-table", page.rows, (one) => one.name, (one) => [
    link(one.name, "dataset", one.name), one.url, one.snapshot ? whole.format(one.files) : "lost", size(one.bytes),
    one.created ? day.format(one.created * 1000) : "", whole.format(one.jobs)]);
}

// --- a job -----------------------------------------------------------------------------------------------------------

const LANES = [
  { name: "Fetched, from origins and other nodes", series: ["origin", "peers"], text: speed, words: ["origins", "other nodes"] },
  { name: "Pushed into the page cache (its datasets)", series: ["pushed"], text: speed },
  { name: "Samples read", series: ["samples"], text: (value) => `${number(value)}/s` },
  { name: "Reads waiting at mounts", series: ["waiting"], text: number },
];
const WIDTH = 600;
const HEIGHT = 44;

/* Sums as rates: of each moment but the first, per second since the one before it. */
function rates(history) {
  const when = history.when ?? [];
  const rate = (sums) => when.slice(1).map((moment, n) => Math.max(0, sums[n + 1] - sums[n]) / Math.max(0.001, moment - when[n]));
  const columns = when.length > 1 ? {
    origin: rate(history.origin), peers: rate(history.peers), pushed: rate(history.pushed),
    samples: rate(history.samples), waiting: rate(history.waited), epoch: history.epoch.slice(1) } : { origin: [] };
  return { when: when.slice(1), ...columns };
}

function showJob(detail) {
  const { job } = detail;
  const before = shown;
  shown = { id: job.id, ...rates(detail.history) };
  show("job", true);
  say($("job-title"), owner(job) ? `${job.name} of ${owner(job)}` : job.name);
  const ended = job.state === "running" ? "" : `, ${job.state}${job.reason ? `: ${job.reason}` : ""}`;
  say($("job-about"), `${job.dataset}; began ${at(job.started)}${ended}. Fetched ${size(job.fetched)} from origins`
    + `, ${size(job.from_peers)} from other nodes; its reads waited ${span(job.waited)} at the mount.${job.shares.map((one) => ` It ${one}.`).join("")}`);
  const loop = job.loop_waited === null ? "How long the loop waited is not known." : `The loop waited ${percent(job.loop_waited)} of the time`;
  say($("job-loop"), job.loop_waited === null ? loop : `${loop}${job.advice ? `; ${job.advice}` : ""}.`);
  list($("job-troubles"), job.troubles, (_, place) => place, () => make("li"), say);
  drawTimeline(!before || before.id !== job.id, before?.when.length ?? 0);
  showRanks(detail);
}

function drawTimeline(isNew, moments) {
  const count = shown.when.length;
  show("timeline-none", !count);
  show("timeline-chart", count);
  if (!count) return;
  const slider = $("moment");
  const follows = isNew || Number(slider.value) >= moments - 1 || Number(slider.value) >= count;
  slider.max = count - 1;
  if (follows) slider.value = count - 1;
  list($("lanes"), LANES, (lane) => lane.name, createLane, fillLane);
  const [first, last] = [shown.when[0], shown.when[count - 1]];
  list($("axis"), [first, (first + last) / 2, last], (_, place) => place, () => make("span"), (mark, unix) => say(mark, at(unix)));
  rows("timeline-table", thinned(), (row) => row.key, (row) => row.cells);
  showMoment();
}

function createLane(lane) {
  const svg = make("svg", { space: SVG, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  for (const name of [...lane.series].reverse()) {
    svg.append(make("path", { space: SVG, class: `area ${name}` }), make("path", { space: SVG, class: `line ${name}` }));
  }
  svg.append(make("path", { space: SVG, class: "epoch" }), make("path", { space: SVG, class: "now" }));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    $("moment").value = String(nearest(shown.when[0] + part * (shown.when.at(-1) - shown.when[0])));
    showMoment();
  });
  const keys = lane.series.length > 1 ? lane.series.map((name, n) => make("span", { class: name }, make("i", { class: "key" }), lane.words[n], " ")) : [];
  return make("div", { class: "lane" }, make("div", { class: "name" }, make("span", {}, lane.series.length > 1 ? "Fetched from " : lane.name, ...keys), make("span", { class: "value" }, make("b"), make("span", { class: "wide" }))), svg);
}

function nearest(moment) {
  let found = 0;
  shown.when.forEach((one, n) => { if (Math.abs(one - moment) < Math.abs(shown.when[found] - moment)) found = n; });
  return found;
}

function fillLane(box, lane) {
  const svg = box.lastElementChild;
  const count = shown.when.length;
  const [first, last] = [shown.when[0], shown.when[count - 1]];
  const x = (n) => ((count > 1 ? (shown.when[n] - first) / (last - first) : 1) * WIDTH).toFixed(1);
  const sums = shown.when.map((_, n) => lane.series.map((name) => shown[name][n]));
  const totals = sums.map((parts) => parts.reduce((sum, one) => sum + one, 0));
  const most = Math.max(...totals);
  const y = (value) => (HEIGHT - 1 - (most ? value / most : 0) * (HEIGHT - 4)).toFixed(1);
  lane.series.forEach((name, place) => { // each on top of those before it
    const heights = sums.map((parts) => parts.slice(0, place + 1).reduce((sum, one) => sum + one, 0));
    const isUsed = place === 0 || shown[name].some((value) => value > 0);
    const line = isUsed ? `M${heights.map((value, n) => `${x(n)} ${y(value)}`).join("L")}` : "";
    svg.querySelector(`.line.${name}`).setAttribute("d", line);
    svg.querySelector(`.area.${name}`).setAttribute("d", line && `${line}L${x(count - 1)} ${HEIGHT}L${x(0)} ${HEIGHT}Z`);
  });
  const begins = shown.epoch.flatMap((epoch, n) => (n && epoch > shown.epoch[n - 1] ? [`M${x(n)} 0V${HEIGHT}`] : []));
  svg.querySelector(".epoch").setAttribute("d", begins.join(""));
  say(box.querySelector(".value span"), `at most ${lane.text(most)}`);
  const mean = totals.reduce((sum, one) => sum + one, 0) / count;
  svg.setAttribute("aria-label", `${lane.name}: from ${at(first)} to ${at(last)}, ${lane.text(mean)} on average, `
    + `${lane.text(most)} at most, ${lane.text(totals[count - 1])} at the end. Epochs ${epochName(shown.epoch[0])} to ${epochName(shown.epoch[count - 1])}.`);
}

function showMoment() {
  const n = Math.min(Number($("moment").value), shown.when.length - 1);
  const [first, last] = [shown.when[0], shown.when.at(-1)];
  const x = (last > first ? (shown.when[n] - first) / (last - first) : 1) * WIDTH;
  const isLast = n === shown.when.length - 1;
  const words = LANES.map((lane, place) => {
    const box = $("lanes").children[place];
    const text = lane.text(lane.series.reduce((sum, name) => sum + shown[name][n], 0));
    say(box.querySelector("b"), text);
    box.querySelector(".now").setAttribute("d", isLast ? "" : `M${x} 0V${HEIGHT}`);
    return `${lane.name} ${text}`;
  });
  $("moment").setAttribute("aria-valuetext", `${at(shown.when[n])}, epoch ${epochName(shown.epoch[n])}: ${words.join("; ")}`);
  say($("moment-text"), `${at(shown.when[n])}, epoch ${epochName(shown.epoch[n])}`);
}

function thinned() { // at most TABLE_ROWS moments, with the mean of those that each stands for
  const each = Math.ceil(shown.when.length / TABLE_ROWS);
  const found = [];
  for (let begin = 0; begin < shown.when.length; begin += each) {
    const end = Math.min(begin + each, shown.when.length);
    const mean = (name) => shown[name].slice(begin, end).reduce((sum, one) => sum + one, 0) / (end - begin);
    const key = shown.when[begin];
    found.push({ key, cells: [at(key), epochName(shown.epoch[end - 1]), speed(mean("origin") + mean("peers")),
      speed(mean("pushed")), number(mean("samples")), number(mean("waiting"))] });
  }
  return found;
}

const SOURCES = { origin: "origins", ssd: "the SSD", daemon: "the daemon", peer: "other nodes" };

function showRanks(detail) {
  const most = Math.max(...detail.ranks.map((rank) => rank.waited), 0.001);
  const left = detail.all_ranks - detail.ranks.length;
  say($("ranks-about"), left > 0 ? `The ${detail.ranks.length} that have waited longest, of ${whole.format(detail.all_ranks)}.` : "");
  rows("ranks-table", detail.ranks, (rank) => rank.rank, (rank) => {
    const sources = Object.entries(rank.sources).sort((one, other) => other[1] - one[1]).map(([name]) => SOURCES[name] ?? name);
    const place = rank.length ? `${epochName(rank.epoch)}, ${percent(rank.read / rank.length)}` : epochName(rank.epoch);
    return [lines(rank.rank || "not known", rank.loader), bar(span(rank.waited), rank.waited / most, "wait"), sources.join(", ") || "nothing",
      whole.format(rank.waits), rank.waits ? span(rank.longest) : "", number(rank.rate),
      lines(place, rank.problem || rank.state, rank.problem !== "")];
  });
}

// --- a dataset -------------------------------------------------------------------------------------------------------

function showDataset({ dataset, shards }) {
  show("dataset", true);
  say($("dataset-title"), dataset.name);
  const problems = dataset.problems ? `; ${plural(dataset.problems, "key")} of the origin cannot be a file` : "";
  const share = dataset.share < 1 ? `; may take ${percent(dataset.share)} of each tier` : "";
  const snapshot = dataset.snapshot ? `snapshot ${dataset.snapshot.slice(0, 8)}` : "snapshot lost";
  say($("dataset-about"), `${dataset.url}, ${snapshot}, ${plural(dataset.files, "file")}, ${size(dataset.bytes)}${share}${problems}`);
  const here = shards.in_memory.length > 0;
  show("map", here);
  show("map-none", !here);
  if (!here) {
    const nothing = `Nothing of it is on this node yet. A job that reads it brings it, or: cachectl warmup ${dataset.name}`;
    const large = "It has too many files to be followed part by part while no job reads it.";
    say($("map-none"), shards.is_counting ? "Its parts are being counted." : shards.is_too_large ? large : nothing);
    if (shards.is_counting) lastMap = 0;
    return;
  }
  drawMap(dataset, shards);
}

function drawMap(dataset, shards) {
  const total = Math.max(1, dataset.bytes);
  const gone = Math.max(0, dataset.bytes - shards.memory - shards.ssd);
  const parts = [["memory", "Memory", shards.memory], ["ssd", "SSD", shards.ssd], ["none", "Not here", gone]];
  list($("map-legend"), parts, ([kind]) => kind, ([kind]) => make("li", { class: kind }, make("i", { class: "key" }), make("span")),
    (item, [, name, bytes]) => say(item.lastChild, `${name} ${percent(bytes / total)}, ${size(bytes)}`));
  const few = shards.blocks > 0 && shards.blocks < 256 ? shards.blocks : 256; // a small dataset has a part per block
  const numbers = Array.from({ length: few }, (_, n) => Math.floor((n * 256) / few) + (few < 256 ? 1 : 0)).map((n) => Math.min(n, 255));
  const texts = { title: few < 256 ? `What of it is on this node, block by block` : "What of it is on this node, in 256 parts" };
  say($("map-title"), texts.title);
  list($("cells"), numbers, (_, n) => n, () => make("i"), () => {});
  numbers.forEach((shard, n) => {
    const [memory, ssd] = [shards.in_memory[shard] / 2.55, shards.in_ssd[shard] / 2.55];
    const cell = $("cells").children[n];
    cell.style.setProperty("--m", `${memory}%`);
    cell.style.setProperty("--s", `${Math.min(100, memory + ssd)}%`);
    cell.title = `part ${n + 1} of ${few}: memory ${Math.round(memory)} %, SSD ${Math.round(ssd)} %`;
  });
  const held = numbers.map((shard) => shards.in_memory[shard] + shards.in_ssd[shard]);
  const empty = held.filter((part) => part === 0).length;
  const full = held.filter((part) => part >= 254).length;
  $("cells").setAttribute("aria-label", `${percent((total - gone) / total)} of ${dataset.name} is on this node: `
    + `${percent(shards.memory / total)} in memory, ${percent(shards.ssd / total)} on the SSD. Of ${few} parts, ${full} are here as a whole and ${empty} not at all.`);
  const step = Math.ceil(few / 16);
  const table = [];
  for (let begin = 0; begin < few; begin += step) {
    const some = numbers.slice(begin, begin + step);
    const mean = (name) => some.reduce((sum, shard) => sum + shards[name][shard], 0) / some.length / 255;
    const [memory, ssd] = [mean("in_memory"), mean("in_ssd")];
    table.push([`${begin + 1} to ${begin + some.length}`, percent(memory), percent(ssd), percent(Math.max(0, 1 - memory - ssd - 0.004))]);
  }
  rows("map-table", table, ([name]) => name, (row) => row);
}

// --- asking ----------------------------------------------------------------------------------------------------------

async function ask(what, query = {}) {
  const answer = await fetch(`api/${what}?${new URLSearchParams(query)}`, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`the daemon answers ${answer.status}`);
  return answer.json();
}

async function refreshDetails() {
  if (chosen.job) {
    const job = await ask("job", { name: chosen.job });
    if (job) showJob(job);
    else { chosen.job = ""; show("job", false); }
  }
  const isOld = Date.now() - lastMap >= MAP_EVERY || $("dataset-title").textContent !== chosen.dataset;
  if (chosen.dataset && isOld) {
    lastMap = Date.now();
    const dataset = await ask("dataset", { name: chosen.dataset });
    if (dataset) showDataset(dataset);
    else { chosen.dataset = ""; show("dataset", false); }
  }
}

let running = null; // the turn that is under way
let queued = null; // the one after it, where somebody waits for that

function refresh() {
  if (!running) return (running = turn().finally(() => { running = null; }));
  queued ??= running.then(() => { queued = null; return refresh(); });
  return queued;
}

async function turn() {
  clearTimeout(timer);
  try {
    const [view, jobs, datasets] = await Promise.all([
      ask("overview"), ask("jobs", { page: pages.jobs }), ask("datasets", { page: pages.datasets, match: $("match").value })]);
    showOverview(view);
    showJobs(jobs);
    showDatasets(datasets);
    await refreshDetails();
    failures = 0;
    state("live", "Live");
  } catch (error) {
    failures += 1;
    if (failures === 1) state("lost", `No answer since ${clock.format(Date.now())}; trying again`);
    console.info(error.message);
  }
  if (!document.hidden) timer = setTimeout(refresh, Math.min(EVERY * 2 ** Math.min(failures, 4), failures ? LONGEST_PAUSE : EVERY));
}

function state(kind, text) {
  $("link").className = kind;
  say($("link"), text); // a screen reader says it when it changes, and only then
}

function choose() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const kind of ["job", "dataset"]) if (wanted.has(kind)) chosen[kind] = wanted.get(kind);
}

document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else refresh(); });
document.addEventListener("click", (event) => { // the keyboard clicks links too
  const kind = event.target.dataset?.kind;
  if (kind) setTimeout(async () => { await refresh(); $(`${kind}-title`).focus(); });
});
window.addEventListener("hashchange", () => { choose(); refresh(); });
$("moment").addEventListener("input", showMoment);
$("match").addEventListener("input", () => { pages.datasets = 0; refresh(); });
$("search").addEventListener("submit", (event) => event.preventDefault());
choose();
refresh();
