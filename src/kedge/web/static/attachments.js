// Attachments of the next message: chosen, pasted or dropped; their types and sizes are checked here and again
// by the server.
import { toast } from "./api.js";

const MAX_BYTES = 5_000_000;
const MAX_TOTAL = 10_000_000;
const MAX_COUNT = 8;
// Types of files that some systems do not know.
const TYPES = { csv: "text/csv", json: "application/json", md: "text/markdown", pdf: "application/pdf", txt: "text/plain" };
let attached = []; // { data, filename, size }

export async function attachFiles(files) {
  const accepted = document.querySelector("[data-attach]")?.accept.split(",") ?? [];
  const problems = [];
  for (const file of files) {
    const total = attached.reduce((sum, attachment) => sum + attachment.size, file.size);
    const type = accepted.includes(file.type) ? file.type : TYPES[file.name.split(".").pop().toLowerCase()];
    if (!accepted.includes(type)) problems.push(`${file.name}: files of this type cannot be attached.`);
    else if (file.size > MAX_BYTES || total > MAX_TOTAL) problems.push(`${file.name} is too large: 5 MB for each file, 10 MB in total.`);
    else if (attached.length >= MAX_COUNT) problems.push(`${file.name}: a message can have ${MAX_COUNT} attachments.`);
    else attached.push({ data: await read(new Blob([file], { type })), filename: file.name, size: file.size });
  }
  if (problems.length) toast(problems.join(" "));
  showAttachments();
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

export const hasAttachments = () => attached.length > 0;

export function takeAttachments() {
  const taken = attached.map(({ data, filename }) => ({ data, filename }));
  attached = [];
  showAttachments();
  return taken;
}

export function restoreAttachments(taken) {
  const restored = taken.map((attachment) => ({ ...attachment, size: Math.floor((attachment.data.length * 3) / 4) }));
  attached = [...restored, ...attached];
  showAttachments();
}

export function showAttachments() {
  const list = document.querySelector("[data-attached]");
  if (!list) return;
  list.hidden = !attached.length;
  list.replaceChildren(...attached.map(buildItem));
}

function buildItem(attachment) {
  const row = document.createElement("li");
  const name = document.createElement("span");
  name.textContent = attachment.filename;
  const remove = document.createElement("button");
  remove.type = "button";
  remove.className = "quiet";
  remove.textContent = "Remove";
  remove.setAttribute("aria-label", `Remove ${attachment.filename}`);
  remove.addEventListener("click", () => {
    attached = attached.filter((other) => other !== attachment);
    showAttachments();
  });
  row.append(name, remove);
  return row;
}

document.addEventListener("change", (event) => {
  if (!event.target.matches("[data-attach]")) return;
  attachFiles([...event.target.files]);
  event.target.value = "";
});
document.addEventListener("paste", (event) => {
  if (!event.target.matches?.("[data-say]") || !event.clipboardData?.files.length) return;
  event.preventDefault();
  attachFiles([...event.clipboardData.files]);
});
document.addEventListener("dragover", (event) => {
  if (event.target.closest?.(".chat") && event.dataTransfer?.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  if (!event.target.closest?.(".chat") || !event.dataTransfer?.files.length) return;
  event.preventDefault();
  attachFiles([...event.dataTransfer.files]);
});
