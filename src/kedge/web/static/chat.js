// Chat: send a message from the selected response, show the answer while it streams, then load the page
// that the server renders. Text is only set as text; markup comes from the server alone.
import { restoreAttachments, showAttachments, takeAttachments } from "./attachments.js";
import { events } from "./sse.js";
import { call, request, toast, Unreachable } from "./api.js";

let running = null; // the id of the run that this page follows
let lost = () => {}; // reports that the connection is lost

export const isRunning = () => running !== null;
export const onLost = (report) => {
  lost = report;
};

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
  addSettings(body);
  const attached = takeAttachments();
  if (attached.length) body.attachments = attached;
  const unsent = await start(grid.dataset.conversation, "turns", body, text);
  if (unsent && !area.value) {
    area.value = unsent;
    restoreAttachments(attached);
  }
}

// The conversation's own model is the first option, and its own system prompt is in the form: only what was
// changed is named in the request.
function addSettings(body) {
  const grid = document.querySelector("[data-conversation]");
  body.head = Number(grid.dataset.headNode);
  const models = document.querySelector("#model");
  if (models && models.selectedIndex > 0) body.model = models.value;
  const given = readSettings();
  if (!given) return;
  if (given.system !== given.initial) body.system = given.system;
  if (given.effort) body.effort = given.effort;
  if (given.temperature !== "") body.temperature = Number(given.temperature);
}

function readSettings() {
  const form = document.querySelector("[data-settings]");
  if (!form) return null;
  const system = form.querySelector("[name=system]");
  return {
    system: system.value,
    initial: system.dataset.initial,
    effort: form.querySelector("[name=effort]").value,
    temperature: form.querySelector("[name=temperature]").value,
  };
}

function restoreSettings(given) {
  const form = document.querySelector("[data-settings]");
  if (!form || !given) return;
  form.querySelector("[name=effort]").value = given.effort;
  form.querySelector("[name=temperature]").value = given.temperature;
  if (given.system !== given.initial) form.querySelector("[name=system]").value = given.system;
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

// The conversation was continued elsewhere: nothing is sent until the user has chosen.
export function showStale(head) {
  const grid = document.querySelector("[data-conversation]");
  const notice = document.querySelector("[data-stale]");
  if (!grid || !notice || Number(grid.dataset.headNode) === head) return;
  notice.dataset.stale = head;
  notice.hidden = false;
}

export function visitNewest() {
  const grid = document.querySelector("[data-conversation]");
  visit(`/conversations/${encodeURIComponent(grid.dataset.conversation)}`, { end: true });
}

export function branch() {
  const grid = document.querySelector("[data-conversation]");
  const here = grid.dataset.node;
  visit(`/conversations/${encodeURIComponent(grid.dataset.conversation)}?at=${here}`, { end: true });
}

async function save(button, text) {
  const grid = document.querySelector("[data-conversation]");
  const body = { block: button.dataset.block, text, head: Number(grid.dataset.headNode) };
  try {
    const made = await call("POST", `${base(grid.dataset.conversation)}/edit`, body);
    await visit(`/conversations/${encodeURIComponent(grid.dataset.conversation)}?at=${made.node}`);
  } catch (error) {
    toast(error.message);
  }
}

export function edit(button) {
  const source = document.querySelector(`template[data-source="${CSS.escape(button.dataset.block)}"]`);
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-label", "Edit message");
  const form = document.createElement("form");
  form.method = "dialog";
  const title = document.createElement("h2");
  title.textContent = "Edit message";
  const area = document.createElement("textarea");
  area.value = source?.content.textContent ?? "";
  area.setAttribute("aria-label", "Your message");
  const actions = document.createElement("div");
  actions.className = "ends";
  const cancel = document.createElement("button");
  cancel.textContent = "Cancel";
  const sendAgain = document.createElement("button");
  sendAgain.className = "primary";
  sendAgain.value = "send";
  sendAgain.textContent = "Send as a new branch";
  const saveOnly = document.createElement("button");
  saveOnly.value = "save";
  saveOnly.textContent = "Save without sending";
  actions.append(cancel, saveOnly);
  if (button.dataset.kind === "user") actions.append(sendAgain);
  form.append(title, area, actions);
  dialog.append(form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => {
    const text = area.value.trim();
    dialog.remove();
    if (!text) return;
    if (dialog.returnValue === "save") save(button, text);
    if (dialog.returnValue !== "send") return;
    const grid = document.querySelector("[data-conversation]");
    const body = { text, stream: true, edit: button.dataset.block, at: Number(button.dataset.at) };
    addSettings(body);
    start(grid.dataset.conversation, "turns", body, text, button.closest("[data-exchange]"));
  });
  dialog.showModal();
}

export function stop(button) {
  const grid = document.querySelector("[data-conversation]");
  if (!running || !grid) return;
  button.disabled = true;
  call("POST", `${base(grid.dataset.conversation)}/runs/${encodeURIComponent(running)}/stop`).catch((error) => toast(error.message));
}

// Send a stored question again; "retry" starts at the question, "resume" after its last stored step.
export function again(button) {
  const grid = document.querySelector("[data-conversation]");
  const exchange = button.closest("[data-exchange]");
  const text = [...exchange.querySelectorAll(".said.user .prose")].map((each) => each.textContent.trim()).join("\n");
  const body = { node: Number(button.dataset.node), restart: button.dataset.do === "retry", stream: true };
  addSettings(body);
  start(grid.dataset.conversation, "resume", body, text, exchange);
}

// Follow a run that was started before this page was loaded, or in another tab.
export function attach() {
  const grid = document.querySelector("[data-run]");
  if (!grid || running) return;
  const path = `${base(grid.dataset.conversation)}/runs/${encodeURIComponent(grid.dataset.run)}`;
  follow(addExchange(grid.dataset.runText), () => request("GET", path));
}

function base(conversation) {
  return `/api/conversations/${encodeURIComponent(conversation)}`;
}

// Start a turn; returns the text if nothing was stored.
function start(conversation, action, body, text, replaced) {
  return follow(addExchange(text, replaced), () => request("POST", `${base(conversation)}/${action}`, body), text);
}

// Show the events of a run. The run belongs to the server: if the connection is lost it continues, and the
// page attaches to it again as soon as the server can be reached.
async function follow(view, open, text = "") {
  running = "starting";
  setBusy(true);
  let next = "";
  let unsent = "";
  let stale = false;
  try {
    const answer = await open();
    running = answer.headers.get("x-kedge-run") ?? "";
    setBusy(true);
    for await (const event of events(answer.body)) {
      if (event.type === "text") view.append(event.delta);
      else if (event.type === "plan") view.note(event.words);
      else if (event.type === "tool") view.note(`calling ${event.name}`);
      else if (event.type === "healed") view.note(event.words);
      else if (event.type === "error") {
        if (event.url) toast(event.message);
        else view.fail(event.message);
        unsent = event.url ? "" : text;
        next = event.url;
      } else if (event.type === "stopped") {
        toast("Stopped. The beginning of the answer is stored.");
        unsent = event.url ? "" : text;
        next = event.url || location.href;
      } else if (event.type === "done") next = event.url;
    }
  } catch (error) {
    if (error instanceof Unreachable || running !== "starting") lost();
    else unsent = text;
    if (error.status === 409) {
      view.remove();
      stale = true;
    } else view.fail(error.message);
  } finally {
    running = null;
    setBusy(false);
  }
  if (stale) lost();
  if (next) await visit(next, { end: true, sent: true }).catch((error) => toast(error.message));
  return unsent;
}

function setBusy(on) {
  const form = document.querySelector("[data-composer]");
  if (!form) return;
  form.querySelector("[data-send]").hidden = on;
  const stop = form.querySelector("[data-do=stop]");
  stop.hidden = !on;
  stop.disabled = !running || running === "starting";
}

function addExchange(text, replaced) {
  const stream = document.getElementById("stream");
  stream.querySelector(".empty")?.remove();
  if (replaced) while (replaced.nextElementSibling) replaced.nextElementSibling.remove();
  replaced?.remove();
  const exchange = document.createElement("div");
  exchange.className = "exchange";
  const question = buildMessage("user", "You", text);
  const note = document.createElement("p");
  note.className = "hint pad";
  note.textContent = "sending";
  const answer = buildMessage("assistant fresh", "Assistant", "");
  answer.querySelector(".prose").setAttribute("aria-live", "polite");
  exchange.append(question, note, answer);
  stream.append(exchange);
  stream.scrollTop = stream.scrollHeight;
  const prose = answer.querySelector(".prose");
  return {
    append(delta) {
      const near = stream.scrollHeight - stream.scrollTop - stream.clientHeight < 80;
      prose.append(delta);
      if (near) stream.scrollTop = stream.scrollHeight;
    },
    remove() {
      exchange.remove();
    },
    note(text) {
      note.textContent = text;
    },
    fail(text) {
      answer.classList.remove("fresh");
      const error = document.createElement("p");
      error.className = "trouble";
      error.setAttribute("role", "alert");
      error.textContent = text;
      note.replaceWith(error);
    },
  };
}

function buildMessage(kind, author, text) {
  const article = document.createElement("article");
  article.className = `said ${kind}`;
  const header = document.createElement("header");
  const name = document.createElement("span");
  name.className = "who";
  name.textContent = author;
  header.append(name);
  const prose = document.createElement("div");
  prose.className = "prose";
  const paragraph = document.createElement("p");
  paragraph.textContent = text;
  prose.append(text ? paragraph : "");
  article.append(header, prose);
  return article;
}

// Load another state of the page and retain the draft, the scroll position and the focus.
export async function visit(url, { end = false, sent = false } = {}) {
  const answer = await request("GET", url);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const main = document.getElementById("main");
  const draft = document.querySelector("[data-say]")?.value ?? "";
  const model = document.querySelector("#model")?.value;
  const settings = sent ? { ...readSettings(), system: "", initial: "" } : readSettings();
  const chain = document.querySelector(".chain")?.scrollTop ?? 0;
  main.replaceChildren(...fresh.getElementById("main").childNodes);
  document.title = fresh.title;
  if (url !== location.href) history.pushState({}, "", url);
  const area = document.querySelector("[data-say]");
  if (area) area.value = draft;
  const models = document.querySelector("#model");
  if (models && model) models.value = model;
  restoreSettings(settings);
  showAttachments();
  showNewest();
  const side = document.querySelector(".chain");
  if (side) side.scrollTop = chain;
  document.querySelector(".rows [aria-current]")?.scrollIntoView({ block: "nearest" });
  if (end) area?.focus({ preventScroll: true });
  attach();
}

// Show the newest message. On a narrow screen the page itself scrolls, and the graph is collapsed.
export function showNewest() {
  const stream = document.getElementById("stream");
  if (!stream) return;
  stream.scrollTop = stream.scrollHeight;
  if (!matchMedia("(max-width: 860px)").matches) return;
  document.querySelector("[data-graph-box]")?.removeAttribute("open");
  scrollTo(0, document.documentElement.scrollHeight);
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
