// Pan by dragging, zoom by the wheel or the buttons; with two fingers, both. The picture comes from the server.

const READABLE = 0.8; // scale of a large graph at first
const FAR = 0.55; // below this scale, only titles are shown, and the states as colours
const MARGIN = 8; // around a node with the focus
const place = document.getElementById("graph");
let view = null;

const picture = () => place?.querySelector("svg");
const whole = () => ({ x: 0, y: 0, w: +picture().dataset.width, h: +picture().dataset.height });

function show() {
  picture().setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.h}`);
  picture().classList.toggle("far", picture().getScreenCTM().a < FAR);
}

// The whole graph if it can be read, else its part where the critical path begins.
function first() {
  const all = whole();
  const { clientWidth, clientHeight } = picture();
  if (Math.min(clientWidth / all.w, clientHeight / all.h) >= FAR) return all;
  const [w, h] = [clientWidth / READABLE, clientHeight / READABLE];
  const from = (place.querySelector(".node.critical") ?? place.querySelector(".node")).getBBox();
  const y = Math.min(Math.max(from.y - h / 2, 0), Math.max(all.h - h, 0));
  return { x: Math.max(from.x - 20, 0), y, w, h };
}

function zoom(factor, x, y) {
  const all = whole();
  const w = Math.min(Math.max(view.w * factor, 200), all.w * 4);
  const scale = w / view.w;
  view = { x: x - (x - view.x) * scale, y: y - (y - view.y) * scale, w, h: view.h * scale };
  show();
}

function point(event) {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture().getScreenCTM().inverse());
  return [at.x, at.y];
}

// The place between two fingers, and how far they are apart; the browser leaves their gesture to us.
function spread(event) {
  if (event.touches.length !== 2) return null;
  if (event.cancelable) event.preventDefault();
  const [one, other] = event.touches;
  return {
    clientX: (one.clientX + other.clientX) / 2,
    clientY: (one.clientY + other.clientY) / 2,
    apart: Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY) || 1,
  };
}

// Move the view so far that all of a node is inside.
function reveal(box) {
  const inside = (at, from, length, size) => Math.max(Math.min(at, from - MARGIN), from + length + MARGIN - size);
  view.x = inside(view.x, box.x, box.width, view.w);
  view.y = inside(view.y, box.y, box.height, view.h);
  show();
}

if (place) {
  view = first();
  show();
  place.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.altKey) return; // the wheel alone scrolls the page
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.15 : 0.87, ...point(event));
  }, { passive: false });
  let from = null;
  let moved = false;
  place.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") return; // one finger scrolls the page
    from = { x: event.clientX, y: event.clientY, view: { ...view } };
    moved = false;
  });
  addEventListener("pointermove", (event) => {
    if (!from) return;
    const scale = 1 / picture().getScreenCTM().a;
    const by = [event.clientX - from.x, event.clientY - from.y];
    moved ||= Math.hypot(...by) > 4;
    view.x = from.view.x - by[0] * scale;
    view.y = from.view.y - by[1] * scale;
    show();
  });
  addEventListener("pointerup", () => { from = null; });
  place.addEventListener("click", (event) => moved && event.preventDefault(), true);
  place.addEventListener("dragstart", (event) => event.preventDefault());
  let fingers = null;
  place.addEventListener("touchstart", (event) => { fingers = spread(event); }, { passive: false });
  place.addEventListener("touchmove", (event) => {
    const now = spread(event);
    if (!now || !fingers) return;
    const before = point(fingers);
    zoom(fingers.apart / now.apart, ...before);
    const after = point(now);
    view.x += before[0] - after[0];
    view.y += before[1] - after[1];
    show();
    fingers = now;
  }, { passive: false });
  place.addEventListener("focusin", (event) => {
    const node = event.target.closest(".node");
    if (node?.matches(":focus-visible")) reveal(node.getBBox());
  });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      if (button.dataset.zoom === "fit") {
        view = whole();
        show();
      } else {
        zoom(+button.dataset.zoom, view.x + view.w / 2, view.y + view.h / 2);
      }
    });
  }
  document.addEventListener("refreshed", () => show());
}
