// The models of the server: which are loaded, loading, unloading and removing them, and downloading others.

import { read } from "./api.js";
import { bytes, find, make, number, percent } from "./page.js";

const INTERVAL = 1000; // milliseconds between two looks while something changes
let timer = null;

export async function show() {
  clearTimeout(timer);
  try {
    const { data, downloads } = await read("/v1/models");
    const held = document.activeElement?.dataset.does; // buttons are made anew, and the focus stays
    const models = data.filter(({ parent }) => !parent);
    const adapters = (id) => data.filter(({ parent }) => parent === id).map((each) => each.id.slice(id.length + 1));
    find("loaded").replaceChildren(...models.map((model) => card(model, adapters(model.id))));
    if (held) document.querySelector(`[data-does="${CSS.escape(held)}"]`)?.focus();
    find("pull").hidden = downloads === undefined;
    find("downloads").replaceChildren(...(downloads ?? []).map(download));
    const changing = data.some(({ state }) => state === "loading") || downloads?.some(({ state }) => state === "downloading");
    if (changing && !find("models").hidden) timer = setTimeout(show, INTERVAL);
  } catch (error) {
    find("loaded").replaceChildren(make("p", { role: "alert" }, error.message));
  }
}

function card(model, adapters) {
  const facts = [
    ["State", [state(model)]],
    ["Family", [model.family]],
    ["Quantisation", [quantization(model)]],
    ["Weights", [model.memory_bytes && bytes(model.memory_bytes)]],
    ["Context", [model.context_length && `${number(model.context_length)} tokens`]],
    ["Capabilities", model.capabilities],
    ["Adapters", adapters],
  ];
  const list = make("dl", { class: "facts" });
  for (const [name, values] of facts) {
    const text = (values ?? []).filter(Boolean).join(", ");
    if (text) list.append(make("dt", {}, name), make("dd", {}, text));
  }
  const why = model.problem ?? (model.native_mtp.available ? null : model.native_mtp.reason);
  return make(
    "article",
    { class: "panel card", "aria-label": model.id },
    make("h2", {}, model.id),
    badge(model),
    ...(why ? [make("p", { class: "quiet" }, why)] : []),
    list,
    ...(model.pinned ? [] : [loadButton(model)]),
    ...(model.removable ? [removeButton(model)] : []),
  );
}

function state({ state, progress, pinned }) {
  if (state === "loading") return `loading, ${percent(progress)}`;
  return pinned ? `${state}, pinned` : state;
}

function button(name, { id, state }, does) {
  const element = make("button", { type: "button", "aria-label": `${name} ${id}`, "data-does": `${name} ${id}` }, name);
  element.disabled = state === "loading";
  element.addEventListener("click", does);
  return element;
}

function loadButton(model) {
  const action = model.state === "loaded" ? "unload" : "load";
  const element = button(action === "load" ? "Load" : "Unload", model, () =>
    act(read(`/v1/models/${action}`, { method: "POST", body: { model: model.id }, timeout: undefined })),
  );
  element.dataset.does = model.id; // the same button, whatever it does next
  return element;
}

function removeButton(model) {
  return button("Remove", model, () => {
    if (!confirm(`Delete the files of ${model.id} from the server's disk?`)) return;
    act(read(`/v1/models/${encodeURI(model.id)}`, { method: "DELETE", timeout: undefined }));
  });
}

async function act(done) {
  timer = setTimeout(show, INTERVAL / 4); // loading takes a while: show how far it is
  try {
    await done;
    await show();
  } catch (error) {
    await show();
    find("loaded").prepend(make("p", { role: "alert", class: "bad" }, error.message));
  }
}

function download({ id, state, bytes: done, total_bytes, problem }) {
  const text = state === "downloading" ? `${id}: ${bytes(done)} of ${bytes(total_bytes)}` : `${id}: ${problem ?? state}`;
  const bar = make("progress", { max: total_bytes || 1, value: done, "aria-label": `Download of ${id}` });
  return make("li", { class: problem ? "bad" : "" }, text, ...(state === "downloading" ? [bar] : []));
}

function badge({ native_mtp: head, drafter }) {
  if (drafter) return make("p", { class: "badge good" }, `DFlash · k up to ${drafter.max_k}`);
  if (!head.available) return make("p", { class: "badge" }, "no MTP");
  return make("p", { class: "badge good" }, `MTP · k = ${head.default_k}, up to ${head.max_k}`);
}

function quantization({ quantization: how }) {
  return how === null ? "none" : `${how.bits} bits, groups of ${how.group_size}`;
}

find("pull").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await read("/v1/models/pull", { method: "POST", body: { model: find("repo").value.trim() } });
    find("pull-state").textContent = "Download started.";
    find("repo").value = "";
  } catch (error) {
    find("pull-state").textContent = error.message;
  }
  show();
});
