// Manage conversations: rename, tag, archive, and delete with a period in which it can be undone.
import { call, conversationApi, toast } from "./api.js";
import { refresh, visit } from "./chat.js";

const UNDO_SECONDS = 30;
const KEY = "kedge-deletions";
let undoTimer = 0;

export async function manage(button) {
  const menu = button.closest("[data-manage]");
  const { manage: id, title } = menu.dataset;
  const tags = JSON.parse(menu.dataset.tags);
  const action = button.dataset.action;
  if (action === "rename") {
    const text = await ask("Rename conversation", "Title", title);
    if (text !== null && text !== title) await change([id], { title: text });
  } else if (action === "tag") {
    const text = await ask("Change tags", "Tags, separated by commas", join(tags));
    if (text !== null && text !== join(tags)) await change([id], { tags: split(text) });
  } else if (action === "mode") {
    const { mode } = menu.dataset;
    const chosen = await choose("Change mode", "Mode, from the next message on", mode, menu.querySelector("[data-mode-options]"));
    if (chosen !== null && chosen !== mode) await change([id], { mode: chosen || null });
  } else if (action === "delete") await remove([id], "/");
  else await change([id], { archived: action === "archive" });
}

export async function bulk(button) {
  const boxes = [...document.querySelectorAll("[data-pick]:checked")];
  const ids = boxes.map((box) => box.dataset.pick);
  const action = button.dataset.action;
  if (action === "delete") await remove(ids, location.href);
  else if (action === "tag") {
    const text = await ask(`Tag ${ids.length === 1 ? "the conversation" : `${ids.length} conversations`}`, "Tags to add, separated by commas", "");
    if (text === null) return;
    await attempt(async () => {
      await forEach(boxes, (box) => {
        const tags = [...new Set([...JSON.parse(box.dataset.tags), ...split(text)])];
        return call("PATCH", conversationApi(box.dataset.pick), { tags });
      });
      location.reload();
    });
  } else await change(ids, { archived: action === "archive" });
}

// Tags are separated by commas; one with a comma or a quotation mark is in quotation marks.
function join(tags) {
  return tags.map((tag) => (/[",]/.test(tag) ? `"${tag.replaceAll('"', '""')}"` : tag)).join(", ");
}

function split(text) {
  const matches = text.matchAll(/\s*(?:"((?:[^"]|"")*)"|([^,]*))\s*(?:,|$)/g);
  return [...matches].map(([, quoted, plain]) => (quoted?.replaceAll('""', '"') ?? plain).trim()).filter(Boolean);
}

async function change(ids, body) {
  await attempt(async () => {
    await forEach(ids, (id) => call("PATCH", conversationApi(id), body));
    await refresh();
  });
}

async function remove(ids, next) {
  await attempt(async () => {
    await forEach(ids, async (id) => {
      await call("DELETE", `${conversationApi(id)}?undo=${UNDO_SECONDS}`);
      writeDeleted([...readDeleted(), { id, until: Date.now() + UNDO_SECONDS * 1000 }]);
    });
    if (next === location.href) location.reload();
    else location.assign(next);
  });
}

// Do the same with each item; an item that fails, such as a conversation that was deleted elsewhere, is skipped and
// reported.
async function forEach(items, work) {
  let problem = null;
  for (const item of items) await work(item).catch((error) => (problem = error));
  if (problem && items.length > 1) await visit(location.href);
  if (problem) throw problem;
}

async function attempt(work) {
  try {
    await work();
  } catch (error) {
    toast(error.message);
    offerUndo(); // a part may have been deleted
  }
}

// The conversations whose deletion can be undone, with the time until then.
function readDeleted() {
  const stored = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
  return stored.filter((deletion) => deletion.until > Date.now());
}

function writeDeleted(deleted) {
  sessionStorage.setItem(KEY, JSON.stringify(deleted));
}

// After a deletion: a notice with the time that is left, and a button that undoes it.
export function offerUndo() {
  const deleted = readDeleted();
  const notice = document.getElementById("undo");
  clearTimeout(undoTimer);
  if (!notice) return;
  notice.hidden = !deleted.length;
  if (!deleted.length) return;
  const left = Math.ceil((Math.min(...deleted.map((deletion) => deletion.until)) - Date.now()) / 1000);
  notice.querySelector("[data-undo-text]").textContent =
    `${deleted.length === 1 ? "The conversation is" : `${deleted.length} conversations are`} deleted for good in ${left} s.`;
  undoTimer = setTimeout(offerUndo, 1000);
}

export async function undo() {
  const deleted = readDeleted();
  writeDeleted([]);
  const results = await Promise.allSettled(deleted.map(({ id }) => call("POST", `${conversationApi(id)}/restore`)));
  const failed = results.find((result) => result.status === "rejected");
  if (failed) toast(failed.reason.message);
  else await refresh().then(offerUndo, (error) => toast(error.message));
}

// A dialog with a text field; resolves to its text, or to null if it was cancelled.
function ask(title, label, value) {
  const input = document.createElement("input");
  input.value = value;
  input.maxLength = 400;
  return openDialog(title, label, input);
}

// A dialog with the options of a template; resolves to the chosen value, or to null if it was cancelled.
function choose(title, label, value, options) {
  const select = document.createElement("select");
  select.append(options.content.cloneNode(true));
  select.value = value;
  return openDialog(title, label, select);
}

function openDialog(title, label, control) {
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-label", title);
  const form = document.createElement("form");
  form.method = "dialog";
  const heading = document.createElement("h2");
  heading.textContent = title;
  const field = document.createElement("label");
  field.className = "field";
  field.append(label, control);
  const ends = document.createElement("div");
  ends.className = "ends";
  const cancel = document.createElement("button");
  cancel.type = "button";
  cancel.textContent = "Cancel";
  cancel.addEventListener("click", () => dialog.close());
  const save = document.createElement("button");
  save.className = "primary";
  save.value = "save";
  save.textContent = "Save";
  ends.append(cancel, save);
  form.append(heading, field, ends);
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "save" ? control.value.trim() : null);
    });
  });
}

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-filter]")) return event.target.form.requestSubmit();
  if (event.target.matches("[data-pick-all]")) {
    for (const box of document.querySelectorAll("[data-pick]")) box.checked = event.target.checked;
  }
  const bar = document.querySelector("[data-bulk]");
  if (!bar) return;
  const count = document.querySelectorAll("[data-pick]:checked").length;
  bar.hidden = !count;
  bar.querySelector("[data-bulk-count]").textContent = `${count} selected`;
});
