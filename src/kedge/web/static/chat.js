// Chat: send a message from the selected response, show the answer while it streams, then load the page
// that the server renders. Text is only set as text; markup comes from the server and from the syntax highlighting.
import { hasAttachments, restoreAttachments, showAttachments, takeAttachments } from "./attachments.js";
import { completeCode } from "./code.js";
import { events } from "./sse.js";
import { call, conversationApi, conversationPage, request, toast, Unreachable } from "./api.js";

let followed = null; // the run that this page follows; its id is empty until the server has started it
let shown = location.pathname + location.search; // the state that is shown
let visits = 0; // the number of states that were loaded
let reportLost = () => {}; // reports that the connection is lost

export const isRunning = () => followed !== null;
export const onLost = (report) => {
  reportLost = report;
};

export function resize(area) {
  if (CSS.supports("field-sizing", "content")) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

export async function send(form) {
  const area = form.querySelector("[data-say]");
  const text = area.value.replace(/^(\s*\n)+/, "").trimEnd(); // the first line may be indented
  if (followed) return;
  if (!text) {
    if (hasAttachments()) toast("Write a message to send with the attachments.");
    return;
  }
  const grid = document.querySelector("[data-conversation]");
  area.value = "";
  resize(area);
  const body = { message: text, stream: true };
  if (grid.dataset.chosen) body.at = Number(grid.dataset.chosen);
  addSettings(body);
  const attached = takeAttachments();
  if (attached.length) body.attachments = attached;
  if (await start(grid.dataset.conversation, "runs", body, text)) restoreDraft(text, attached);
}

// Put a message that was not sent back into the composer, before what was written meanwhile.
function restoreDraft(text, attached) {
  const area = document.querySelector("[data-say]");
  if (!area) return;
  area.value = [text, area.value].filter(Boolean).join("\n\n");
  resize(area);
  restoreAttachments(attached);
}

// The conversation's own model is the first option, and its own system prompt is in the form: only what was
// changed is named in the request.
function addSettings(body) {
  const grid = document.querySelector("[data-conversation]");
  body.head = Number(grid.dataset.headNode);
  const models = document.querySelector("#model");
  if (models && models.selectedIndex > 0) body.model = models.value;
  const settings = readSettings();
  if (!settings) return;
  if (settings.system !== settings.initial) body.system = settings.system;
  if (settings.effort) body.effort = settings.effort;
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
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

function restoreSettings(settings) {
  const form = document.querySelector("[data-settings]");
  if (!form || !settings) return;
  form.querySelector("[name=effort]").value = settings.effort;
  form.querySelector("[name=temperature]").value = settings.temperature;
  if (settings.system !== settings.initial) form.querySelector("[name=system]").value = settings.system;
}

export function moveTo(button) {
  const grid = document.querySelector("[data-conversation]");
  const url = `${conversationPage(grid.dataset.conversation)}?at=${button.dataset.node}`;
  visit(url).then(() => document.querySelector("[data-say]")?.focus(), reportError);
}

export async function fork(button) {
  const grid = document.querySelector("[data-conversation]");
  try {
    const path = `${conversationApi(grid.dataset.conversation)}/fork`;
    const forked = await call("POST", path, { at: Number(button.dataset.node) });
    location.assign(conversationPage(forked.id));
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
  visit(conversationPage(grid.dataset.conversation), { end: true }).catch(reportError);
}

export function branch() {
  const grid = document.querySelector("[data-conversation]");
  const url = `${conversationPage(grid.dataset.conversation)}?at=${grid.dataset.node}`;
  visit(url, { end: true }).catch(reportError);
}

async function save(button, text) {
  const grid = document.querySelector("[data-conversation]");
  const body = { block: button.dataset.block, text, head: Number(grid.dataset.headNode) };
  try {
    const edited = await call("POST", `${conversationApi(grid.dataset.conversation)}/edit`, body);
    await visit(`${conversationPage(grid.dataset.conversation)}?at=${edited.node}`);
  } catch (error) {
    edit(button, text, error.message);
  }
}

// Edit a message; a text that was not sent or saved is offered again, with the problem.
export function edit(button, unsaved, problem) {
  const source = document.querySelector(`template[data-source="${CSS.escape(button.dataset.block)}"]`);
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-label", "Edit message");
  const form = document.createElement("form");
  form.method = "dialog";
  const title = document.createElement("h2");
  title.textContent = "Edit message";
  const area = document.createElement("textarea");
  area.value = unsaved ?? source?.content.textContent ?? "";
  area.dir = "auto";
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
  const { node, headNode } = document.querySelector("[data-conversation]").dataset;
  saveOnly.disabled = node !== headNode; // the path to the head is changed
  if (saveOnly.disabled) saveOnly.title = "Only at the current position of the conversation";
  actions.append(cancel, saveOnly);
  if (button.dataset.kind === "user") actions.append(sendAgain);
  form.append(title, ...(problem ? [buildAlert(problem)] : []), area, actions);
  dialog.append(form);
  document.body.append(dialog);
  dialog.addEventListener("close", async () => {
    const text = area.value;
    dialog.remove();
    if (!text.trim()) return;
    if (dialog.returnValue === "save") save(button, text);
    if (dialog.returnValue !== "send") return;
    const grid = document.querySelector("[data-conversation]");
    const body = { message: text, stream: true, edit: button.dataset.block, at: Number(button.dataset.at) };
    addSettings(body);
    const failure = await start(grid.dataset.conversation, "runs", body, text, button.closest("[data-exchange]"));
    if (failure) edit(button, text, failure);
  });
  dialog.showModal();
}

export function stop(button) {
  const grid = document.querySelector("[data-conversation]");
  if (!followed?.id || !grid) return;
  button.disabled = true;
  call("POST", `${conversationApi(grid.dataset.conversation)}/runs/${encodeURIComponent(followed.id)}/stop`).catch(reportError);
}

// Send a stored question again; "resume" continues after its last stored step, the others start at the question.
export async function again(button) {
  const grid = document.querySelector("[data-conversation]");
  const exchange = button.closest("[data-exchange]");
  const questions = [...exchange.querySelectorAll(".said.user .prose")];
  const text = questions.map((prose) => prose.textContent.trim()).join("\n");
  const body = { node: Number(button.dataset.node), restart: button.dataset.do !== "resume", stream: true };
  addSettings(body);
  const failure = await start(grid.dataset.conversation, "resume", body, text, exchange);
  if (failure) toast(failure);
}

// Follow a run that was started before this page was loaded, or in another tab.
export function attach() {
  const grid = document.querySelector("[data-run]");
  if (!grid || followed) return;
  const path = `${conversationApi(grid.dataset.conversation)}/runs/${encodeURIComponent(grid.dataset.run)}`;
  follow(addExchange(grid.dataset.runMessage), () => request("GET", path));
}

// Start a run; returns the problem if nothing was stored.
function start(conversation, action, body, text, replaced) {
  return follow(addExchange(text, replaced), () => request("POST", `${conversationApi(conversation)}/${action}`, body));
}

// Show the events of a run. The run belongs to the server: if the connection is lost it continues, and the
// page attaches to it again as soon as the server can be reached. If another state is loaded meanwhile, the
// page follows the run no longer. Returns the problem if nothing was stored.
async function follow(view, open) {
  const run = { id: "" };
  followed = run;
  setBusy(true);
  let next = "";
  let failure = "";
  let plan = "";
  let isStale = false;
  try {
    const answer = await open();
    run.id = answer.headers.get("x-kedge-run") ?? "";
    if (followed === run) setBusy(true);
    next = location.href; // in case that the connection ends before the run
    for await (const event of events(answer.body)) {
      if (followed !== run) return "";
      if (event.type === "text") view.append(event.delta);
      else if (event.type === "plan") view.note((plan = event.words));
      else if (event.type === "sent") view.note(`${plan} ${event.words}`);
      else if (event.type === "tool") view.note(`calling ${event.name}`);
      else if (event.type === "healed") view.note(event.words);
      else if (event.type === "error") {
        if (event.url) toast(event.message);
        else view.fail((failure = event.message));
        next = event.url;
      } else if (event.type === "cancelled") {
        toast(event.url ? "Stopped. The beginning of the answer is stored." : "Stopped.");
        if (!event.url) failure = "The message was not sent.";
        next = event.url || location.href;
      } else if (event.type === "done") next = event.url;
    }
  } catch (error) {
    next = "";
    if (!run.id) failure = error.message;
    isStale = error.status === 409;
    if (isStale) view.remove();
    else view.fail(run.id ? "The connection to the server was lost." : error.message);
    if (followed !== run && failure) toast(failure);
    if (followed === run && (error instanceof Unreachable || run.id)) reportLost();
  } finally {
    if (followed === run) {
      followed = null;
      setBusy(false);
    } else next = "";
  }
  if (isStale) reportLost();
  if (next) await visit(next, { end: true, sent: true }).catch(reportError);
  return failure;
}

function reportError(error) {
  toast(error.message);
}

function setBusy(on) {
  const form = document.querySelector("[data-composer]");
  if (!form) return;
  form.querySelector("[data-send]").hidden = on;
  const stop = form.querySelector("[data-do=stop]");
  stop.hidden = !on;
  stop.disabled = !followed?.id;
}

// On a narrow screen the page itself scrolls.
const isNarrow = () => matchMedia("(max-width: 860px)").matches;
const getScroller = () => (isNarrow() ? document.documentElement : document.getElementById("stream"));

function isAtEnd(element) {
  return element.scrollHeight - element.scrollTop - element.clientHeight < 80;
}

// Add an exchange that is being written. The one that it replaces, and all after it, are hidden until the page is
// loaded again, and shown again if the message was not sent.
function addExchange(text, replaced) {
  const stream = document.getElementById("stream");
  const scroller = getScroller();
  stream.querySelector(".empty")?.remove();
  const shownExchanges = [...stream.children];
  const hidden = replaced?.isConnected ? shownExchanges.slice(shownExchanges.indexOf(replaced)) : [];
  for (const element of hidden) element.hidden = true;
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
  scroller.scrollTop = scroller.scrollHeight;
  const prose = answer.querySelector(".prose");
  const remove = () => {
    exchange.remove();
    for (const element of hidden) element.hidden = false;
  };
  let pending = "";
  // Text is shown once per frame: a layout for each delta takes longer than a long answer.
  const show = () => {
    if (!pending) return;
    const wasAtEnd = isAtEnd(scroller);
    prose.append(pending);
    prose.normalize();
    pending = "";
    if (wasAtEnd) scroller.scrollTop = scroller.scrollHeight;
  };
  return {
    append(delta) {
      if (!pending) requestAnimationFrame(show);
      pending += delta;
    },
    remove,
    note(text) {
      note.textContent = text;
    },
    fail(text) {
      if (hidden.length) return remove();
      show();
      answer.classList.remove("fresh");
      answer.hidden = !prose.textContent;
      note.replaceWith(buildAlert(text));
    },
  };
}

function buildAlert(text) {
  const alert = document.createElement("p");
  alert.className = "trouble";
  alert.setAttribute("role", "alert");
  alert.textContent = text;
  return alert;
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
  prose.dir = "auto";
  const paragraph = document.createElement("p");
  paragraph.textContent = text;
  prose.append(text ? paragraph : "");
  article.append(header, prose);
  return article;
}

// Load another state of the page, or the same one again, and retain the draft and its focus; the scroll position is
// retained if it is the same state.
export async function visit(url, { end = false, sent = false } = {}) {
  const target = new URL(url, location.href).href;
  const number = ++visits;
  const answer = await request("GET", target);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (number !== visits) return; // another state was chosen meanwhile
  const main = document.getElementById("main");
  const composer = readComposer();
  if (sent && composer.settings) Object.assign(composer.settings, { system: "", initial: "" }); // it was sent
  const treeScroll = document.querySelector(".response-tree")?.scrollTop ?? 0;
  const scroller = document.getElementById("stream") && getScroller();
  const position = !end && target === location.href && scroller && !isAtEnd(scroller) ? scroller.scrollTop : null;
  main.replaceChildren(...fresh.getElementById("main").childNodes);
  followed = null;
  document.title = fresh.title;
  if (target !== location.href) history.pushState({}, "", target);
  shown = location.pathname + location.search;
  restoreComposer(composer, end);
  showAttachments();
  completeCode();
  showNewest();
  if (position !== null && document.getElementById("stream")) getScroller().scrollTop = position;
  const tree = document.querySelector(".response-tree");
  if (tree) tree.scrollTop = treeScroll;
  document.querySelector(".rows [aria-current]")?.scrollIntoView({ block: "nearest" });
  attach();
}

// What the user has entered in the composer, with the position of the cursor if it has the focus.
function readComposer() {
  const area = document.querySelector("[data-say]");
  const hasFocus = area && area === document.activeElement;
  const models = document.querySelector("#model");
  return {
    text: area?.value ?? "",
    selection: hasFocus ? [area.selectionStart, area.selectionEnd] : null,
    model: models?.selectedIndex > 0 ? models.value : "",
    settings: readSettings(),
  };
}

function restoreComposer({ text, selection, model, settings }, takesFocus) {
  const area = document.querySelector("[data-say]");
  if (area) {
    area.value = text;
    resize(area);
    if (selection || takesFocus) area.focus({ preventScroll: true });
    if (selection) area.setSelectionRange(...selection);
  }
  const models = document.querySelector("#model");
  if (model && [...(models?.options ?? [])].some((option) => option.value === model)) models.value = model;
  restoreSettings(settings);
}

// Show what was changed; a conversation retains the draft.
export async function refresh() {
  if (document.querySelector("[data-conversation]")) await visit(location.href);
  else location.reload();
}

// Show the newest message. On a narrow screen the graph and the recent conversations are collapsed.
export function showNewest() {
  if (!document.getElementById("stream")) return;
  if (isNarrow()) for (const box of document.querySelectorAll("[data-graph-box]")) box.open = false;
  const scroller = getScroller();
  scroller.scrollTop = scroller.scrollHeight;
}

// Back and forward; a link to a part of the page changes no state.
addEventListener("popstate", () => {
  if (location.pathname + location.search !== shown) visit(location.href).catch(() => location.reload());
});
// Links to other states of the conversation retain the draft.
document.addEventListener("click", (event) => {
  const link = event.target.closest(".rows a, .omitted a, .from a, [data-other-run] a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  const node = link.dataset.node;
  const below = link.closest(".omitted") ? getScroller().scrollHeight - getScroller().scrollTop : 0;
  visit(link.href).then(() => {
    const row = node && document.querySelector(`.rows a[data-node="${CSS.escape(node)}"]`);
    if (row && !event.detail) row.focus({ preventScroll: true }); // selected with the keyboard
    if (below) getScroller().scrollTop = getScroller().scrollHeight - below; // older messages are added above
  }, reportError);
});
