// The dashboard: the server reports when something changed and sends the figures rendered again.

export function watch(element) {
  if (!element) return;
  const state = document.querySelector("[data-live-state]");
  const label = document.querySelector("[data-live-words]");
  const query = new URLSearchParams({ range: element.dataset.live, seen: element.dataset.seen });
  const source = new EventSource(`/dashboard/live?${query}`);
  const show = (text, on) => {
    label.textContent = text;
    state.classList.toggle("on", on);
  };
  source.addEventListener("open", () => show("live", true));
  source.addEventListener("error", () => show("reconnecting", false));
  source.addEventListener("figures", (event) => {
    const fresh = new DOMParser().parseFromString(JSON.parse(event.data), "text/html");
    element.replaceChildren(...fresh.body.childNodes);
    element.dataset.updates = String(Number(element.dataset.updates ?? 0) + 1);
  });
  addEventListener("pagehide", () => source.close());
}
