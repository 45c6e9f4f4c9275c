// Workflows: start one from the form, and follow one while it runs.
import { completeCode } from "./code.js";
import { events } from "./sse.js";
import { call, request, toast } from "./api.js";

export function chooseKind(form) {
  for (const field of form.querySelectorAll("[data-for]")) {
    field.hidden = !field.dataset.for.split(" ").includes(form.kind.value);
  }
}

export async function startWorkflow(form) {
  const kind = form.kind.value;
  const body = { kind, model: form.model.value };
  if (kind !== "steps") {
    Object.assign(body, { question: form.question.value.trim(), rubric: form.rubric.value.trim(), rounds: Number(form.rounds.value), judge_model: form.judge_model.value });
  }
  if (kind === "debate") body.sides = lines(form.sides.value).map(([name, brief]) => side(name, brief));
  if (kind === "steps") body.steps = lines(form.steps.value).map(([name, prompt]) => ({ name, prompt: prompt || name }));
  try {
    const started = await call("POST", "/api/workflows", body);
    location.assign(`/workflows/${encodeURIComponent(started.id)}`);
  } catch (error) {
    toast(error.message);
  }
}

// A participant may have a model of its own: "name @ model".
function side(text, brief) {
  const [name, model = ""] = text.split("@").map((part) => part.trim());
  return { name, brief, model };
}

function lines(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
    const [name, ...rest] = line.split(":");
    return [name.trim(), rest.join(":").trim()];
  });
}

export async function followWorkflow() {
  const element = document.querySelector("[data-workflow]");
  if (!element) return;
  try {
    const answer = await request("GET", `/api/workflows/${encodeURIComponent(element.dataset.workflow)}/events`);
    for await (const event of events(answer.body)) {
      if (event.type === "error") toast(event.message);
      await refresh();
    }
  } catch (error) {
    if (error.status !== 404) toast(error.message);
  }
  await refresh().catch((error) => toast(error.message));
}

async function refresh() {
  const answer = await request("GET", location.href);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const main = document.getElementById("main");
  const areOpen = [...main.querySelectorAll("details")].map((details) => details.open);
  main.replaceChildren(...fresh.getElementById("main").childNodes);
  main.querySelectorAll("details").forEach((details, index) => (details.open = areOpen[index] ?? false)); // rounds are only added
  completeCode();
}

export function stopWorkflow(button) {
  const id = button.closest("[data-workflow]").dataset.workflow;
  call("POST", `/api/workflows/${encodeURIComponent(id)}/stop`).catch((error) => toast(error.message));
}
