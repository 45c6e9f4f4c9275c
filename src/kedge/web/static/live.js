// The dashboard moves: the server says when something changed and sends the figures drawn anew.

export function watch(place) {
  if (!place) return;
  const state = document.querySelector("[data-live-state]");
  const words = document.querySelector("[data-live-words]");
  const asked = new URLSearchParams({ range: place.dataset.live, seen: place.dataset.seen });
  const source = new EventSource(`/dashboard/live?${asked}`);
  const say = (text, on) => {
    words.textContent = text;
    state.classList.toggle("on", on);
  };
  source.addEventListener("open", () => say("live", true));
  source.addEventListener("error", () => say("reconnecting", false));
  source.addEventListener("figures", (event) => {
    const fresh = new DOMParser().parseFromString(JSON.parse(event.data), "text/html");
    place.replaceChildren(...fresh.body.childNodes);
    place.dataset.updates = String(Number(place.dataset.updates ?? 0) + 1);
  });
  addEventListener("pagehide", () => source.close());
}
