// Shared by all pages: following changes, counting times, keys, the palette, and actions. Pages are readable without.

const body = document.body;
const workspace = body.dataset.workspace;
const live = document.getElementById("live");

// --- Putting a newer version of the page in place ---

const keyOf = (node) => (node.nodeType === 1 && (node.id || node.dataset.issue || node.getAttribute("href"))) || null;
const KEPT = new Set(["open", "aria-busy", "data-loaded", "data-over"]);

function syncAttributes(old, made) {
  for (const { name } of [...old.attributes]) {
    if (!made.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of made.attributes) {
    if (old.getAttribute(name) !== value && name !== "aria-busy") old.setAttribute(name, value);
  }
}

function morph(old, made) {
  if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName) {
    old.replaceWith(made);
    return;
  }
  if (old.nodeType !== 1) {
    if (old.nodeValue !== made.nodeValue) old.nodeValue = made.nodeValue;
    return;
  }
  if (old.matches("form") && old.contains(document.activeElement)) return; // somebody types there
  if (old.dataset.until !== made.dataset.until) delete old.dataset.over;
  syncAttributes(old, made);
  if (old.dataset.src !== undefined) return; // its content is loaded on its own
  morphChildren(old, made);
}

function morphChildren(old, made) {
  const known = new Map();
  for (const child of old.childNodes) if (keyOf(child)) known.set(keyOf(child), child);
  let place = old.firstChild;
  for (const child of [...made.childNodes]) {
    const key = keyOf(child);
    let match = key ? known.get(key) : place;
    if (!key && match && keyOf(match)) match = null;
    if (match && match.parentNode === old) {
      known.delete(key);
      if (match === place) place = place.nextSibling;
      else old.insertBefore(match, place);
      morph(match, child);
    } else {
      old.insertBefore(child, place);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

async function ask(address) { // again after a moment, while the server has no place for it
  const answer = await fetch(address, { headers: { accept: "text/html" } });
  const seconds = +answer.headers.get("retry-after");
  if (!seconds) return answer;
  await new Promise((done) => setTimeout(done, 1000 * seconds));
  return ask(address);
}

const SHARE = 3; // the pause after a refresh, as a multiple of its duration
const MOST_PAUSE = 10000; // milliseconds
let loading = false;
let again = false;

async function refresh() {
  if (document.hidden || loading) {
    again = true;
    return;
  }
  loading = true;
  again = false;
  const began = Date.now();
  try {
    const answer = await ask(location.href);
    if (answer.status === 401) {
      say("The server was restarted. Open the address that it printed.");
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const made = page.querySelector("main");
    if (made) {
      body.dataset.made = page.body.dataset.made || body.dataset.made;
      morph(document.querySelector("main"), document.adoptNode(made));
      loadParts(true);
      document.dispatchEvent(new Event("refreshed"));
    }
  } catch {
    // the server does not answer: the stream of events reports it
  } finally {
    setTimeout(() => { // a page that takes long to make is asked for less often
      loading = false;
      if (again) refresh();
    }, Math.min(SHARE * (Date.now() - began), MOST_PAUSE));
  }
}
document.addEventListener("visibilitychange", () => !document.hidden && again && refresh());

// --- Parts that take longer ---

async function loadPart(part) {
  try {
    const answer = await ask(part.dataset.src);
    if (!answer.ok) return; // it stays as it is
    const made = new DOMParser().parseFromString(await answer.text(), "text/html").body;
    morphChildren(part, document.adoptNode(made));
    part.dataset.loaded = "yes";
    part.removeAttribute("aria-busy");
    const later = part.querySelector("[data-again]");
    if (later) setTimeout(() => loadPart(part), +later.dataset.again);
  } catch {
    // it stays as it is
  }
}

function loadParts(every) {
  for (const part of document.querySelectorAll("main [data-src]")) {
    const folded = part.closest("details:not([open])");
    if (folded) folded.addEventListener("toggle", () => part.dataset.loaded || loadPart(part), { once: true });
    else if (!part.dataset.loaded || (every && part.dataset.once === undefined)) loadPart(part);
  }
}

// --- Events of the server: one tab listens, and informs the others ---

const channel = new BroadcastChannel("holdfast");
let leads = false;
let changes = {}; // when each workspace last changed, as far as the tab that listens knows

function heard(message) {
  if (message.state) showLive(message.state);
  const isNew = message.change === workspace || message.changes?.[workspace] >= body.dataset.made;
  if (message.fresh || (isNew && body.dataset.final === undefined)) refresh();
}

function tell(message) {
  heard(message);
  channel.postMessage(message);
}

function showLive(state) {
  live.className = `live ${state}`;
  live.title = state === "on" ? "live" : "not connected: trying again";
  live.firstElementChild.textContent = live.title;
  if (state === "on") document.querySelector(".banner")?.remove();
}

function listen() {
  let pause = 500;
  let was = false;
  const connect = () => {
    const source = new EventSource("/events");
    source.addEventListener("hello", (event) => {
      pause = 500;
      changes = JSON.parse(event.data);
      tell({ state: "on", fresh: was, changes });
      was = true;
    });
    source.addEventListener("change", (event) => {
      const change = JSON.parse(event.data);
      changes[change.workspace] = change.at;
      tell({ change: change.workspace });
    });
    source.onerror = () => {
      source.close();
      tell({ state: "off" });
      if (was) refresh();
      setTimeout(connect, pause);
      pause = Math.min(pause * 2, 5000);
    };
  };
  connect();
}

if (live) {
  channel.onmessage = ({ data }) => {
    if (data.ask && leads) channel.postMessage({ state: live.classList.contains("on") ? "on" : "off", changes });
    else heard(data);
  };
  // A browser opens few connections to one server: one tab, which has this lock, listens for all of them.
  navigator.locks.request("holdfast-events", () => {
    leads = true;
    listen();
    return new Promise(() => {}); // until this tab is closed
  });
  channel.postMessage({ ask: true });
}

// --- Times ---

const UNITS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];

function coarse(seconds) {
  const [unit, size] = UNITS.find(([, each]) => seconds >= each) || ["s", 1];
  return `${Math.floor(seconds / size)}${unit}`;
}

function precise(seconds) {
  let rest = Math.max(0, Math.round(seconds));
  const shown = [];
  for (const [unit, size] of UNITS) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count) shown.push(`${count}${unit}`);
  }
  return shown.slice(0, 2).join("") || "0s";
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function tick() {
  if (document.hidden) return;
  const now = Date.now() / 1000;
  for (const each of document.querySelectorAll("time[data-at]")) {
    const ago = now - each.dataset.at;
    put(each, ago < 1 ? (ago > -1 ? "now" : `in ${coarse(-ago)}`) : `${coarse(ago)} ago`);
  }
  for (const each of document.querySelectorAll("[data-until]")) {
    const left = each.dataset.until - now;
    if (left > 0) {
      put(each, precise(left));
      each.classList.toggle("warn", left < 60);
    } else if (!each.dataset.over) {
      each.dataset.over = "yes";
      put(each, "expired");
      refresh();
    }
  }
}
setInterval(tick, 1000);

// --- Keys ---

const help = document.getElementById("help");
const palette = document.getElementById("palette");
let afterG = 0;

function step(by) {
  const all = [...document.querySelectorAll("main .card, main .rows tbody tr")].filter((each) => each.offsetParent);
  if (!all.length) return;
  const here = all.findIndex((each) => each.classList.contains("current"));
  const next = all[Math.max(0, Math.min(all.length - 1, here < 0 ? 0 : here + by))];
  all.forEach((each) => each.classList.toggle("current", each === next));
  (next.matches("a") ? next : next.querySelector("a"))?.focus();
  next.scrollIntoView({ block: "nearest" });
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("holdfast-theme", document.documentElement.dataset.theme);
}

const KEYS = {
  "/": () => document.getElementById("search")?.focus(),
  "?": () => help?.showModal(),
  g: () => { afterG = Date.now(); },
  j: () => step(1),
  k: () => step(-1),
  t: switchTheme,
};

document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && palette) {
    event.preventDefault();
    openPalette();
    return;
  }
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.nodeName);
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const went = Date.now() - afterG < 1500;
  afterG = 0;
  const link = went && document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`);
  if (link) link.click();
  else if (KEYS[event.key]) {
    event.preventDefault();
    KEYS[event.key]();
  }
});
document.getElementById("help-button")?.addEventListener("click", () => help.showModal());

// --- The palette ---

let filled = false;

async function openPalette() {
  palette.showModal();
  const input = palette.querySelector("input");
  input.value = "";
  narrow("");
  input.focus();
  if (filled) return;
  filled = true;
  const answer = await ask(palette.dataset.src).catch(() => null);
  if (!answer?.ok) return;
  const made = new DOMParser().parseFromString(await answer.text(), "text/html").body;
  document.getElementById("palette-list").append(...made.childNodes);
  narrow(input.value);
}

function narrow(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  let first = null;
  for (const each of document.querySelectorAll("#palette-list a")) {
    const has = each.dataset.words.toLowerCase();
    each.hidden = !words.every((word) => has.includes(word));
    each.classList.remove("current");
    if (!each.hidden) first ||= each;
  }
  first?.classList.add("current");
}

palette?.addEventListener("input", (event) => narrow(event.target.value));
palette?.addEventListener("keydown", (event) => {
  const shown = [...document.querySelectorAll("#palette-list a:not([hidden])")];
  const here = shown.findIndex((each) => each.classList.contains("current"));
  if (event.key === "Enter" && shown[here]) {
    event.preventDefault();
    shown[here].click();
  } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    const next = shown[Math.max(0, Math.min(shown.length - 1, here + (event.key === "ArrowDown" ? 1 : -1)))];
    shown.forEach((each) => each.classList.toggle("current", each === next));
    next?.scrollIntoView({ block: "nearest" });
  }
});

// --- Actions ---

const TOAST = "holdfast-toast";

async function act(address, given) {
  const answer = await fetch(address, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(given),
  });
  const failed = { ok: false, error: { message: `The server answered ${answer.status}`, hint: "" } };
  const done = await answer.json().catch(() => failed);
  const words = [done.ok ? done.message : `${done.error.message}. ${done.error.hint}`, done.command];
  if (done.page) sessionStorage.setItem(TOAST, JSON.stringify(words)); // that page shows it
  else toast(...words);
  return done;
}

function toast(text, command) {
  const place = document.getElementById("toast");
  place.replaceChildren(text);
  if (command) {
    const code = document.createElement("code");
    code.textContent = command;
    place.append(code);
  }
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => place.replaceChildren(), 12000);
}

const kept = sessionStorage.getItem(TOAST);
sessionStorage.removeItem(TOAST);
if (kept) toast(...JSON.parse(kept));

function say(text) {
  const banner = document.querySelector(".banner") || body.appendChild(document.createElement("div"));
  banner.className = "banner";
  banner.setAttribute("role", "alert");
  banner.textContent = text;
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!form.matches("form.action")) return;
  event.preventDefault();
  const done = await act(form.getAttribute("action"), Object.fromEntries(new FormData(form)));
  if (done.ok && done.page) {
    location.assign(done.page);
  } else if (done.ok) {
    document.activeElement?.blur();
    refresh();
  }
});
document.addEventListener("act", (event) => act(event.detail.address, event.detail.given)); // from other scripts

loadParts(false);
const here = document.querySelector("nav a[aria-current]");
if (here) { // in sight, where the screen is too narrow for all pages
  const nav = here.parentNode;
  nav.scrollLeft = here.offsetLeft - nav.offsetLeft - (nav.clientWidth - here.offsetWidth) / 2;
}
