// The model that the server has loaded.

import { read } from "./api.js";
import { find, make, number } from "./page.js";

export async function show() {
  try {
    const loaded = (await read("/v1/models")).data;
    find("loaded").replaceChildren(...loaded.map(card));
  } catch (error) {
    find("loaded").replaceChildren(make("p", { role: "alert" }, error.message));
  }
}

function card(model) {
  const facts = [
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
  const why = model.native_mtp.available ? null : model.native_mtp.reason;
  return make(
    "article",
    { class: "panel card" },
    make("h3", {}, model.id),
    badge(model),
    ...(why ? [make("p", { class: "quiet" }, why)] : []),
    list,
  );
}

function badge({ native_mtp: head, drafter }) {
  if (drafter) return make("p", { class: "badge good" }, `DFlash · k up to ${drafter.max_k}`);
  if (!head.available) return make("p", { class: "badge" }, "no MTP");
  return make("p", { class: "badge good" }, `MTP · k = ${head.default_k}, up to ${head.max_k}`);
}

function quantization({ quantization: how }) {
  return how === null ? "none" : `${how.bits} bits, groups of ${how.group_size}`;
}
