// Common to every page: buttons, copying, themes and keyboard shortcuts. Handlers are attached to the
// document, so that they also apply to elements added later.
import "./attachments.js";
import { again, attach, branch, edit, fork, moveTo, resize, send, showNewest, showPlan, stop, visitNewest } from "./chat.js";
import { completeCode } from "./code.js";
import { watchConnection } from "./connection.js";
import { press } from "./keys.js";
import { watch } from "./live.js";
import { bulk, manage, offerUndo, undo } from "./manage.js";
import { call, conversationPage, toast } from "./api.js";
import { chooseKind, followWorkflow, startWorkflow, stopWorkflow } from "./workflows.js";

const actions = {
  theme: switchTheme,
  keys: () => document.getElementById("keys")?.showModal(),
  copy: (button) => copy(button.dataset.text ?? readSource(button)),
  new: startConversation,
  fork,
  edit,
  moveTo,
  stop,
  bulk,
  manage,
  undo,
  stopWorkflow,
  newest: visitNewest,
  branch,
  retry: again,
  regenerate: again,
  resume: again,
};

function switchTheme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme ?? (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("kedge-theme", root.dataset.theme);
  } catch {
    // Not remembered where storage is switched off.
  }
}

// The text of a code block, or the Markdown of a message.
function readSource(button) {
  const code = button.closest(".code")?.querySelector("pre");
  return code?.textContent ?? document.querySelector(`template[data-source="${CSS.escape(button.dataset.block)}"]`).content.textContent;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    toast(text);
  }
}

async function startConversation(button) {
  button.disabled = true;
  try {
    const created = await call("POST", "/api/conversations", {});
    location.assign(conversationPage(created.id));
  } catch (error) {
    button.disabled = false;
    toast(error.message);
  }
}

function closeMenu(menu) {
  menu.open = false;
  menu.querySelector("summary").focus();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]");
  if (button) actions[button.dataset.do]?.(button);
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});
document.addEventListener(
  "toggle",
  (event) => {
    if (event.target.matches("details[data-plan]")) showPlan(event.target);
  },
  true,
);
// A value that is rejected is shown by the browser, which it cannot do in a menu that is closed.
document.addEventListener("invalid", (event) => event.target.closest("details:not([open])")?.setAttribute("open", ""), true);
document.addEventListener("submit", (event) => {
  if (event.target.matches("[data-composer]")) {
    event.preventDefault();
    send(event.target);
  } else if (event.target.matches("[data-workflow-form]")) {
    event.preventDefault();
    startWorkflow(event.target);
  }
});
document.addEventListener("input", (event) => {
  if (event.target.matches("[data-workflow-form] [name=kind]")) chooseKind(event.target.form);
  if (event.target.matches("[data-say]")) resize(event.target);
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches?.("[data-say]") && event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    event.target.form.requestSubmit();
  } else if (event.key === "Escape" && event.target.closest?.("details.menu[open]")) {
    closeMenu(event.target.closest("details.menu"));
  } else {
    press(event, actions);
  }
});

watch(document.querySelector("[data-live]"));
const linked = document.getElementById(location.hash.slice(1));
if (linked?.matches("details")) linked.open = true;
if (!location.hash) showNewest();
document.querySelector(".rows [aria-current]")?.scrollIntoView({ block: "center" });
attach();
if (document.querySelector("nav")) watchConnection();
offerUndo();
followWorkflow();
completeCode();
