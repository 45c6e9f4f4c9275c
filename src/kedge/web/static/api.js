// Requests to the API, and notifications; an error shows the message of the API.

export class Unreachable extends Error {}

export const conversationApi = (id) => `/api/conversations/${encodeURIComponent(id)}`;
export const conversationPage = (id) => `/conversations/${encodeURIComponent(id)}`;

export async function call(method, path, body) {
  const answer = await request(method, path, body);
  return answer.status === 204 ? null : answer.json();
}

export async function request(method, path, body, signal) {
  const options = { method, signal, headers: {} };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server cannot be reached. Is kedge serve still running?");
  }
  const isLogin = answer.redirected && new URL(answer.url).pathname === "/login"; // a page without a valid session
  const status = isLogin ? 401 : answer.status;
  if (status >= 400) throw Object.assign(new Error(await readError(answer, status)), { status });
  return answer;
}

async function readError(answer, status) {
  if (status === 401) return "Your session has ended. Reload the page to log in.";
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

let hideTimer = 0;

export function toast(text) {
  const element = document.getElementById("toast");
  if (!element) return;
  element.textContent = text;
  element.classList.add("shown");
  clearTimeout(hideTimer);
  hideTimer = setTimeout(() => element.classList.remove("shown"), 3500);
}
