// A conversation with the model that is served.

import { Answer } from "./answer.js";
import { chosen } from "./api.js";
import { drafting, find, make } from "./page.js";
import { race } from "./race.js";

let messages = [];
let running = null; // aborts the answer in progress
let drafts = false; // whether the model can draft
const wide = matchMedia("(min-width: 44rem)");

export function show() {
  if (matchMedia("(pointer: fine)").matches) find("question").focus({ preventScroll: true });
}

/** Set the options for the served model. */
export function serve(model) {
  const head = drafting(model);
  drafts = head.available;
  const depths = ["auto", ...Array.from({ length: head.max_k }, (_, k) => String(k + 1))];
  find("depth").replaceChildren(...depths.map((k) => make("option", { value: k }, k)));
  for (const id of ["speculation", "depth", "race"]) find(id).disabled = !drafts;
  find("speculation").checked = drafts;
  find("thinking-choice").hidden = !model.capabilities.includes("thinking");
  find("question").placeholder = `Ask ${model.id}. Enter sends, Shift+Enter is a new line.`;
}

/** The options as fields of a request. */
function options() {
  const fields = {};
  if (drafts) fields.num_draft_tokens = find("speculation").checked ? depth() : 0;
  if (find("temperature").value) fields.temperature = Number(find("temperature").value);
  if (find("max-tokens").value) fields.max_tokens = Number(find("max-tokens").value);
  if (find("thinking").value) fields.enable_thinking = find("thinking").value === "true";
  return fields;
}

const depth = () => (find("depth").value === "auto" ? "auto" : Number(find("depth").value));

/** `reply(place, body, signal)` shows an answer in `place` and returns its text, or null if there is none. */
async function ask(reply) {
  const question = find("question").value.trim();
  if (!question || running !== null) return;
  running = new AbortController();
  const asked = [...messages, { role: "user", content: question }];
  const place = make("article", { class: "turn", "aria-label": "Answer" });
  find("thread").append(make("article", { class: "turn question", "aria-label": "Question" }, question), place);
  find("thread").scrollTop = find("thread").scrollHeight;
  find("question").value = find("heard").textContent = "";
  busy(true);
  const text = await reply(place, { messages: asked, ...chosen(), ...options() }, running.signal);
  if (text !== null) messages = [...asked, { role: "assistant", content: text }];
  running = null;
  busy(false);
}

async function answer(place, body, signal) {
  const one = new Answer();
  place.append(one.element);
  if (!(await one.ask(body, signal))) return null;
  find("heard").textContent = one.content; // read out once, not with every word
  return one.content;
}

function busy(yes) {
  if (document.activeElement?.closest(".actions")) show(); // the pressed button is hidden, and would take the focus with it
  find("send").disabled = yes;
  find("race").disabled = yes || !drafts;
  find("stop").hidden = !yes;
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(answer);
});
find("race").addEventListener("click", () => ask((place, body, signal) => race(place, body, depth(), signal)));
find("stop").addEventListener("click", () => running?.abort());
find("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !find("chat").hidden) running?.abort();
});
find("colours").addEventListener("change", (event) => find("thread").classList.toggle("coloured", event.target.checked));
find("speculation").addEventListener("change", (event) => (find("depth").disabled = !event.target.checked));
/** On a phone the options are folded; elsewhere they are always open. */
const fold = () => (find("options").open = wide.matches);
wide.addEventListener("change", fold);
fold();
find("fresh").addEventListener("click", () => {
  running?.abort();
  messages = [];
  find("thread").replaceChildren();
  find("question").focus();
});
