// The connection to the server: a banner while it is lost, and what changed in the conversation meanwhile.
import { attach, isRunning, onLost, showStale, visit } from "./chat.js";
import { call, conversationApi, Unreachable } from "./api.js";

const INTERVAL = 2000;
const UNREACHABLE = "The server cannot be reached. Messages that were sent are stored; trying to reconnect…";
let timer = 0;
let isLost = false;

export function watchConnection() {
  onLost(() => check());
  document.addEventListener("visibilitychange", () => document.hidden || check());
  schedule();
}

function schedule() {
  clearTimeout(timer);
  timer = setTimeout(check, INTERVAL);
}

async function check() {
  clearTimeout(timer);
  try {
    if (!document.hidden || isLost) await poll();
  } finally {
    schedule();
  }
}

async function poll() {
  const grid = document.querySelector("[data-conversation]");
  const path = choosePath(grid);
  let state = null;
  try {
    state = await call("GET", path);
  } catch (error) {
    if (error instanceof Unreachable) return report(UNREACHABLE);
    if (error.status === 401) return report(error.message);
    if (error.status === 404) return report("This conversation was deleted."); // which can be undone
  }
  if (grid && !grid.isConnected) return; // another state was loaded meanwhile
  if (isLost) {
    report("");
    if (grid && !isRunning()) await visit(location.href).catch(() => {});
    else if (document.querySelector("[data-workflow]")) location.reload();
  } else if (grid && state && !isRunning()) {
    const known = grid.dataset.runs.split(" ");
    const isNew = state.data.some((run) => run.id === grid.dataset.run || !known.includes(run.id));
    if (isNew) await visit(location.href).catch(() => {}); // a run was started in another tab
    else if (!state.data.length) document.querySelector("[data-other-run]")?.remove();
  }
  if (grid && state && !isRunning() && !state.data.length) showStale(state.head);
  attach();
}

function choosePath(grid) {
  if (grid) return `${conversationApi(grid.dataset.conversation)}/runs`;
  return document.body.dataset.section === "login" ? "/healthz" : "/api/session"; // which needs a session
}

function report(text) {
  isLost = Boolean(text);
  const banner = document.getElementById("lost");
  banner.hidden = !text;
  banner.textContent = text;
}
