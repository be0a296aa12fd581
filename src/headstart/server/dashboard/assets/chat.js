// Conversations with the models of the server.

import { Answer, follow } from "./answer.js";
import { chosen } from "./api.js";
import * as chats from "./chats.js";
import { drafting, find, make } from "./page.js";
import * as pictures from "./pictures.js";
import { race } from "./race.js";

let chat = chats.current();
let turns = []; // what is shown: the kept turns, and those that failed or were stopped
let editing = null; // the turn whose question is in the form
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

/** A question with its pictures. */
function content({ question, pictures: seen }) {
  const parts = seen.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return parts.length ? [...parts, { type: "text", text: question }] : question;
}

/** The conversation as messages. Answers that failed or were stopped are not part of it. */
function messages() {
  const system = find("system").value.trim();
  const said = turns.filter(({ answer }) => answer !== null);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said.flatMap((turn) => [{ role: "user", content: content(turn) }, { role: "assistant", content: turn.answer }]),
  ];
}

/**
 * `reply(place, body, signal)` shows an answer in `place` and returns its text, or null if there is none. The question
 * takes the pictures in the form along, and those of the turn that it replaces, or only those `retaken`.
 */
async function ask(question, reply, retaken = null) {
  if (!question || running !== null) return;
  const seen = retaken ?? [...(editing?.pictures ?? []), ...pictures.take()];
  if (editing !== null) cut(editing);
  running = new AbortController();
  const before = messages();
  const turn = addTurn(question, seen);
  const asked = [...before, { role: "user", content: content(turn) }];
  find("question").value = find("heard").textContent = "";
  busy(true);
  const answered = reply(turn.place, { messages: asked, ...chosen(), ...options() }, running.signal);
  find("thread").scrollTop = find("thread").scrollHeight; // the form and the answer have their places
  turn.answer = await answered;
  follow(() => turn.place.append(actions(turn)));
  running = null;
  busy(false);
  if (turns.includes(turn)) keep(); // or another chat was opened meanwhile
}

async function answer(place, body, signal) {
  const one = new Answer();
  place.append(one.element);
  if (!(await one.ask(body, signal))) return null;
  find("heard").textContent = one.content; // read out once, not with every word
  return one.content;
}

function addTurn(question, seen = []) {
  const place = make("article", { class: "turn", "aria-label": "Answer" });
  const asked = make("article", { class: "turn question", "aria-label": "Question" }, ...seen.map(({ preview }) => preview), question);
  const turn = { question, pictures: seen, answer: null, asked, place };
  turns.push(turn);
  find("thread").append(asked, place);
  return turn;
}

/** What can be done with a turn that has ended. */
function actions(turn) {
  const buttons = [
    ["Edit", "Edit the question", () => edit(turn)],
    ["Regenerate", "Regenerate the answer", () => again(turn)],
    ...(turn.answer === null ? [] : [["Copy", "Copy the answer", () => copy(turn.answer)]]),
  ];
  return make("div", { class: "turn-actions", role: "group", "aria-label": "Actions" }, ...buttons.map(button));
}

function button([text, name, act]) {
  const element = make("button", { type: "button", "aria-label": name }, text);
  element.addEventListener("click", act);
  return element;
}

/** Put a question back into the form. Sending it replaces this turn and all after it; Escape does not. */
function edit(turn) {
  if (running !== null) return;
  stopEditing();
  editing = turn;
  turn.asked.classList.add("editing");
  find("question").value = turn.question;
  find("heard").textContent = "Editing. Enter sends, Escape keeps the answer.";
  find("question").focus();
}

function stopEditing() {
  editing?.asked.classList.remove("editing");
  editing = null;
}

function again(turn) {
  if (running !== null) return;
  cut(turn);
  find("question").focus({ preventScroll: true });
  ask(turn.question, answer, turn.pictures);
}

/** Remove a turn and all after it. */
function cut(turn) {
  for (const { asked, place } of turns.splice(turns.indexOf(turn))) {
    asked.remove();
    place.remove();
  }
  stopEditing();
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    find("heard").textContent = "Copied.";
  } catch {
    find("heard").textContent = "The browser does not let this page copy. Select the text instead.";
  }
}

/** Keep the conversation, without its pictures: they are too large for the browser's storage. */
function keep() {
  chat.system = find("system").value;
  chat.turns = turns.filter(({ answer }) => answer !== null).map(({ question, answer }) => ({ question, answer }));
  if (chat.turns.length) chats.save(chat);
  list();
}

/** Fill the list of conversations. */
function list() {
  const kept = chats.all();
  const shown = kept.some(({ id }) => id === chat.id) ? kept : [chat, ...kept];
  find("chats").replaceChildren(...shown.map((each) => make("option", { value: each.id }, chats.title(each))));
  find("chats").value = chat.id;
  find("chats").hidden = find("delete").hidden = kept.length === 0;
}

function open(other) {
  running?.abort();
  stopEditing();
  chat = other;
  chats.open(chat);
  turns = [];
  find("thread").replaceChildren();
  find("system").value = chat.system;
  for (const { question, answer: text } of chat.turns) {
    const turn = addTurn(question);
    turn.answer = text;
    turn.place.append(Answer.of(text).element, actions(turn));
  }
  find("thread").scrollTop = find("thread").scrollHeight;
  list();
}

function busy(yes) {
  if (document.activeElement?.closest(".actions")) show(); // the pressed button is hidden, and would take the focus with it
  find("send").disabled = yes;
  find("race").disabled = yes || !drafts;
  find("stop").hidden = !yes;
}

const typed = () => find("question").value.trim();

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(typed(), answer);
});
find("race").addEventListener("click", () => ask(typed(), (place, body, signal) => race(place, body, depth(), signal)));
find("stop").addEventListener("click", () => running?.abort());
find("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || find("chat").hidden) return;
  running?.abort();
  if (editing !== null) find("question").value = "";
  stopEditing();
});
find("colours").addEventListener("change", (event) => find("thread").classList.toggle("coloured", event.target.checked));
find("speculation").addEventListener("change", (event) => (find("depth").disabled = !event.target.checked));
find("system").addEventListener("change", keep);
find("chats").addEventListener("change", ({ target }) => {
  open(chats.all().find(({ id }) => id === target.value) ?? chats.fresh());
});
find("delete").addEventListener("click", () => {
  chats.remove(chat);
  open(chats.all()[0] ?? chats.fresh());
  find("question").focus();
});
find("fresh").addEventListener("click", () => {
  open(chats.fresh());
  find("question").focus();
});
/** On a phone the options are folded; elsewhere they are always open. */
const fold = () => (find("options").open = wide.matches);
wide.addEventListener("change", fold);
fold();
open(chat);
