// A line follows the pointer; a click shows the holdings at that moment.

const place = document.getElementById("timeline");

function instantAt(event) {
  const svg = place.querySelector(".times");
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const { begin, end, left, width } = place.dataset;
  const share = (at.x - left) / (width - left - 8);
  const inside = share >= 0 && share <= 1 && !event.target.closest(".names");
  return { x: at.x, instant: +begin + share * (end - begin), inside };
}

// Where the lanes are wider than the screen, show the chosen moment, or else the present.
if (place) {
  const { begin, end } = place.dataset;
  const at = new URL(location.href).searchParams.get("at");
  const share = at === null ? 1 : (at - begin) / (end - begin);
  place.scrollLeft = share * place.scrollWidth - place.clientWidth / 2;
}

place?.addEventListener("pointermove", (event) => {
  const { x, inside } = instantAt(event);
  const line = document.getElementById("pointer");
  for (const name of ["x1", "x2"]) line.setAttribute(name, inside ? x : -9);
});
place?.addEventListener("click", (event) => {
  const { instant, inside } = instantAt(event);
  if (!inside) return;
  const address = new URL(location.href);
  address.searchParams.set("at", instant.toFixed(3));
  location.assign(address);
});
