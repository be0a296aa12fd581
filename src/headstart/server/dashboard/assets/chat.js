// A conversation with the model that is served.

import { Answer } from "./answer.js";
import { find, make } from "./page.js";
import * as pictures from "./pictures.js";
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
  drafts = model.native_mtp.available;
  for (let k = 1; k <= model.native_mtp.max_k; k++) find("depth").append(make("option", { value: k }, String(k)));
  for (const id of ["speculation", "depth", "race"]) find(id).disabled = !drafts;
  find("speculation").checked = drafts;
  find("thinking-choice").hidden = !model.capabilities.includes("thinking");
  pictures.allow(model.capabilities.includes("vision"));
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
  const { parts, previews } = pictures.take();
  const content = parts.length ? [...parts, { type: "text", text: question }] : question;
  const asked = [...messages, { role: "user", content }];
  const place = make("article", { class: "turn", "aria-label": "Answer" });
  const shown = make("article", { class: "turn question", "aria-label": "Question" }, ...previews, question);
  find("thread").append(shown, place);
  find("thread").scrollTop = find("thread").scrollHeight;
  find("question").value = find("heard").textContent = "";
  busy(true);
  const text = await reply(place, { messages: asked, ...options() }, running.signal);
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
