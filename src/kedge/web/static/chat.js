// Chat: send a message from the selected response, show the answer while it streams, then load the page
// that the server renders. Text is only set as text; markup comes from the server alone.
import { events } from "./sse.js";
import { call, request, toast } from "./tell.js";

let running = null;

export function resize(area) {
  if (CSS.supports("field-sizing", "content")) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

export async function send(form) {
  const area = form.querySelector("[data-say]");
  const text = area.value.trim();
  if (!text || running) return;
  const grid = document.querySelector("[data-conversation]");
  area.value = "";
  resize(area);
  const body = { text, stream: true };
  if (grid.dataset.chosen) body.at = Number(grid.dataset.chosen);
  addModel(body);
  const left = await run(grid.dataset.conversation, body, text);
  if (left && !area.value) area.value = left;
}

// The conversation's own model is the first option; only another one is named in the request.
function addModel(body) {
  const models = document.querySelector("#model");
  if (models && models.selectedIndex > 0) body.model = models.value;
}

export function fork(button) {
  const grid = document.querySelector("[data-conversation]");
  const to = `/conversations/${encodeURIComponent(grid.dataset.conversation)}?at=${button.dataset.node}`;
  visit(to).then(() => document.querySelector("[data-say]")?.focus());
}

export async function split(button) {
  const grid = document.querySelector("[data-conversation]");
  try {
    const path = `/api/conversations/${encodeURIComponent(grid.dataset.conversation)}/fork`;
    const made = await call("POST", path, { at: Number(button.dataset.node) });
    location.assign(`/conversations/${encodeURIComponent(made.id)}`);
  } catch (error) {
    toast(error.message);
  }
}

// The server renders a plan when its card is first opened.
export async function showPlan(card) {
  const body = card.querySelector("[data-plan-body]");
  if (!card.open || !body) return;
  try {
    const answer = await request("GET", `${card.dataset.plan}?part=1`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    body.replaceWith(...fresh.body.childNodes);
  } catch (error) {
    toast(error.message);
  }
}

export function edit(button) {
  const source = document.querySelector(`template[data-source="${CSS.escape(button.dataset.block)}"]`);
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-label", "Edit and send again");
  const form = document.createElement("form");
  form.method = "dialog";
  const title = document.createElement("h2");
  title.textContent = "Edit and send again";
  const area = document.createElement("textarea");
  area.value = source?.content.textContent ?? "";
  area.setAttribute("aria-label", "Your message");
  const ends = document.createElement("div");
  ends.className = "ends";
  const cancel = document.createElement("button");
  cancel.textContent = "Cancel";
  const again = document.createElement("button");
  again.className = "primary";
  again.value = "send";
  again.textContent = "Send as a new branch";
  ends.append(cancel, again);
  form.append(title, area, ends);
  dialog.append(form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => {
    const text = area.value.trim();
    dialog.remove();
    if (dialog.returnValue !== "send" || !text) return;
    const grid = document.querySelector("[data-conversation]");
    const body = { text, stream: true, edit: button.dataset.block, at: Number(button.dataset.at) };
    addModel(body);
    run(grid.dataset.conversation, body, text, button.closest("[data-exchange]"));
  });
  dialog.showModal();
}

export function stop() {
  running?.abort();
}

// Run one turn; returns the text if it was not sent.
async function run(conversation, body, text, instead) {
  running = new AbortController();
  const place = show(text, instead);
  busy(true);
  try {
    const path = `/api/conversations/${encodeURIComponent(conversation)}/turns`;
    const answer = await request("POST", path, body, running.signal);
    for await (const event of events(answer.body)) {
      if (event.type === "text") place.say(event.delta);
      else if (event.type === "plan") place.note(event.words);
      else if (event.type === "tool") place.note(`calling ${event.name}`);
      else if (event.type === "healed") place.note(event.words);
      else if (event.type === "error") throw new Error(event.message);
      else if (event.type === "done") await visit(event.url, { end: true });
    }
    return "";
  } catch (error) {
    if (error.name === "AbortError") toast("Stopped.");
    else place.fail(error.message);
    if (error.name === "AbortError") await visit(location.href, { end: true });
    return text;
  } finally {
    running = null;
    busy(false);
  }
}

function busy(on) {
  const form = document.querySelector("[data-composer]");
  if (!form) return;
  form.querySelector("[data-send]").hidden = on;
  form.querySelector("[data-do=stop]").hidden = !on;
}

function show(text, instead) {
  const stream = document.getElementById("stream");
  stream.querySelector(".empty")?.remove();
  if (instead) while (instead.nextElementSibling) instead.nextElementSibling.remove();
  instead?.remove();
  const exchange = document.createElement("div");
  exchange.className = "exchange";
  const asked = said("user", "You", text);
  const note = document.createElement("p");
  note.className = "hint pad";
  note.textContent = "sending";
  const answered = said("assistant fresh", "Assistant", "");
  exchange.append(asked, note, answered);
  stream.append(exchange);
  stream.scrollTop = stream.scrollHeight;
  const prose = answered.querySelector(".prose");
  return {
    say(delta) {
      const near = stream.scrollHeight - stream.scrollTop - stream.clientHeight < 80;
      prose.append(delta);
      if (near) stream.scrollTop = stream.scrollHeight;
    },
    note(words) {
      note.textContent = words;
    },
    fail(words) {
      answered.classList.remove("fresh");
      const trouble = document.createElement("p");
      trouble.className = "trouble";
      trouble.setAttribute("role", "alert");
      trouble.textContent = words;
      note.replaceWith(trouble);
    },
  };
}

function said(kind, who, text) {
  const article = document.createElement("article");
  article.className = `said ${kind}`;
  const header = document.createElement("header");
  const name = document.createElement("span");
  name.className = "who";
  name.textContent = who;
  header.append(name);
  const prose = document.createElement("div");
  prose.className = "prose";
  const words = document.createElement("p");
  words.textContent = text;
  prose.append(text ? words : "");
  article.append(header, prose);
  return article;
}

// Load another state of the page and retain the draft, the scroll position and the focus.
export async function visit(url, { end = false } = {}) {
  const answer = await request("GET", url);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const main = document.getElementById("main");
  const draft = document.querySelector("[data-say]")?.value ?? "";
  const model = document.querySelector("#model")?.value;
  const chain = document.querySelector(".chain")?.scrollTop ?? 0;
  main.replaceChildren(...fresh.getElementById("main").childNodes);
  document.title = fresh.title;
  if (url !== location.href) history.pushState({}, "", url);
  const area = document.querySelector("[data-say]");
  if (area) area.value = draft;
  const models = document.querySelector("#model");
  if (models && model) models.value = model;
  const stream = document.getElementById("stream");
  if (stream) stream.scrollTop = stream.scrollHeight;
  const side = document.querySelector(".chain");
  if (side) side.scrollTop = chain;
  document.querySelector(".rows [aria-current]")?.scrollIntoView({ block: "nearest" });
  if (end) area?.focus({ preventScroll: true });
}

addEventListener("popstate", () => location.reload());
document.addEventListener("click", (event) => {
  const link = event.target.closest(".rows a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  const node = link.dataset.node;
  visit(link.href).then(() => {
    const again = node && document.querySelector(`.rows a[data-node="${CSS.escape(node)}"]`);
    if (again) again.focus({ preventScroll: true });
  }, (error) => toast(error.message));
});
