// Keyboard shortcuts: j and k select the next and the previous row of the page; the help lists the others. What is
// typed in a conversation is a message: there, shortcuts apply while the keyboard's focus is in the list of responses.

export function press(event, actions) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (event.target.closest?.("input, textarea, select, dialog")) {
    if (event.key === "Escape" && event.target.matches?.("input, textarea")) leave(event.target);
    return;
  }
  const area = document.querySelector("[data-say]");
  if (area && !document.querySelector(".response-tree :focus-visible")) {
    const isText = event.key === "Dead" || (event.key.length === 1 && event.key !== " "); // a space presses a button
    if (isText) area.focus();
    return;
  }
  const keys = {
    j: () => step(1),
    k: () => step(-1),
    "/": () => focus("[data-search]"),
    c: () => focus("[data-say]"),
    p: togglePlans,
    t: () => actions.theme(),
    "?": () => actions.keys(),
  };
  const action = keys[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function leave(field) {
  field.blur();
  focus(".rows [aria-current]");
}

function focus(selector) {
  document.querySelector(selector)?.focus();
}

function togglePlans() {
  const cards = [...document.querySelectorAll("[data-plan]")];
  const areAllOpen = cards.every((card) => card.open);
  for (const card of cards) card.open = !areAllOpen;
}

function step(by) {
  const rows = [...document.querySelectorAll("[data-row] .what > a:first-child, .rows a")];
  if (!rows.length) return;
  let index = rows.indexOf(document.activeElement);
  if (index < 0) index = rows.findIndex((row) => row.getAttribute("aria-current"));
  const next = rows[Math.min(Math.max(index + by, 0), rows.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  if (next.dataset.node) next.click();
}
