// The loaded model, the others on this machine, and the supported ones that are not here.

import { read } from "./api.js";
import { bytes, find, make, number } from "./page.js";

const TIMEOUT = 300_000; // milliseconds: a full disk takes a while to search
let asked = false;

export async function show() {
  if (asked) return;
  asked = true;
  try {
    const loaded = (await read("/v1/models")).data;
    find("loaded").replaceChildren(...loaded.map(card));
    find("on-disk").replaceChildren(make("p", { class: "quiet" }, "Searching …"));
    const { on_disk, known } = await read("/v1/cards", { timeout: TIMEOUT });
    find("on-disk").replaceChildren(...on_disk.filter((model) => !model.loaded).map(card));
    find("known").replaceChildren(...known.map(card));
  } catch (error) {
    asked = false; // the next visit tries again
    find("on-disk").replaceChildren(make("p", { role: "alert" }, error.message));
  }
}

function card(model) {
  const facts = [
    ["Parameters", [model.parameters, model.active_parameters && `${model.active_parameters} active`]],
    ["Size", [model.bytes && bytes(model.bytes)]],
    ["Family", [model.family]],
    ["Quantisation", [quantization(model)]],
    ["Context", [model.context_length && `${number(model.context_length)} tokens`]],
    ["Capabilities", model.capabilities],
  ];
  const list = make("dl", { class: "facts" });
  for (const [name, values] of facts) {
    const text = (values ?? []).filter(Boolean).join(", ");
    if (text) list.append(make("dt", {}, name), make("dd", {}, text));
  }
  const why = model.problem ?? (model.native_mtp.available ? null : model.native_mtp.reason);
  return make(
    "article",
    { class: "panel card" },
    make("h3", {}, model.id),
    badge(model),
    ...(why ? [make("p", { class: "quiet" }, why)] : []),
    list,
  );
}

function badge({ problem, native_mtp: head }) {
  if (problem) return make("p", { class: "badge bad" }, "cannot be loaded");
  if (!head.available) return make("p", { class: "badge" }, "no MTP");
  return make("p", { class: "badge good" }, `MTP · k = ${head.default_k}, up to ${head.max_k}`);
}

function quantization({ quantization: how }) {
  if (how === undefined) return null; // not known of a model that is not here
  return how === null ? "none" : `${how.bits} bits, groups of ${how.group_size}`;
}
