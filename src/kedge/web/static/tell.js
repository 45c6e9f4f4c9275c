// Talking with the API, and with the person: errors are the API's own words.

export class Unreachable extends Error {}

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
  if (!answer.ok) throw Object.assign(new Error(await words(answer)), { status: answer.status });
  return answer;
}

async function words(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

let fading = 0;

export function toast(text) {
  const place = document.getElementById("toast");
  if (!place) return;
  place.textContent = text;
  place.classList.add("shown");
  clearTimeout(fading);
  fading = setTimeout(() => place.classList.remove("shown"), 3500);
}
