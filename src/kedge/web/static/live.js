// The dashboard: the server reports when something changed and sends the figures rendered again. A hidden tab has
// no connection, because browsers open only a few to one server, for all tabs together.

export function watch(element) {
  if (!element) return;
  const state = document.querySelector("[data-live-state]");
  const label = document.querySelector("[data-live-words]");
  const query = new URLSearchParams({ range: element.dataset.live, seen: element.dataset.seen });
  let source = null;
  const show = (text, on) => {
    label.textContent = text;
    state.classList.toggle("on", on);
  };
  const close = () => source?.close();
  const open = () => {
    close();
    source = new EventSource(`/dashboard/live?${query}`);
    source.addEventListener("open", () => show("live", true));
    source.addEventListener("error", () => show("reconnecting", false));
    source.addEventListener("figures", (event) => {
      const fresh = new DOMParser().parseFromString(JSON.parse(event.data), "text/html");
      element.replaceChildren(...fresh.body.childNodes);
      element.dataset.updates = String(Number(element.dataset.updates ?? 0) + 1);
    });
  };
  const follow = () => {
    if (!document.hidden) return open();
    close();
    show("paused", false);
  };
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", close);
  follow();
}
