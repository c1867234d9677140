// Dragging a card to another column moves the issue. Only a writable page has cards that can be dragged.

let dragged = null;
const cardsAt = (event) => event.target.closest?.(".column")?.querySelector(".cards[data-state]");

document.addEventListener("dragstart", (event) => {
  dragged = event.target.closest?.(".card[draggable=true]");
  dragged?.classList.add("dragged");
});
document.addEventListener("dragend", () => {
  dragged?.classList.remove("dragged");
  document.querySelectorAll(".cards.over").forEach((each) => each.classList.remove("over"));
  dragged = null;
});
document.addEventListener("dragover", (event) => {
  const cards = cardsAt(event);
  if (!dragged || !cards) return;
  event.preventDefault();
  document.querySelectorAll(".cards.over").forEach((each) => each !== cards && each.classList.remove("over"));
  cards.classList.add("over");
});
document.addEventListener("drop", (event) => {
  const cards = cardsAt(event);
  if (!dragged || !cards || cards.contains(dragged)) return;
  event.preventDefault();
  const given = { issue: dragged.dataset.issue, state: cards.dataset.state };
  const address = `/r/${document.body.dataset.workspace}/do/move`;
  document.dispatchEvent(new CustomEvent("act", { detail: { address, given } }));
});
