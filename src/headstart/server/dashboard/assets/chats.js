// Conversations, kept in this browser. Where its storage is blocked, they last as long as the page.

import { store } from "./store.js";

const MOST = 100; // conversations
const MOST_CHARACTERS = 4e6; // of all: browsers keep five million
const kept = store("localStorage", "headstart-chats");
const last = store("localStorage", "headstart-chat");

const isChat = (chat) => typeof chat?.id === "string" && typeof chat.system === "string" && Array.isArray(chat.turns);

/** All conversations, the last one first. A turn is a question and its answer. */
export function all() {
  try {
    return JSON.parse(kept.get() ?? "[]").filter(isChat);
  } catch {
    return []; // not written by this page
  }
}

export const fresh = () => ({ id: `${Date.now()}-${Math.random()}`, system: "", turns: [] });

/** The conversation that was open last, or an empty one. */
export const current = () => all().find(({ id }) => id === last.get()) ?? fresh();

export const open = (chat) => last.set(chat.id);

export function save(chat) {
  // Another tab may have saved others meanwhile.
  const chats = [chat, ...all().filter(({ id }) => id !== chat.id)].slice(0, MOST);
  while (chats.length > 1 && JSON.stringify(chats).length > MOST_CHARACTERS) chats.pop();
  kept.set(JSON.stringify(chats));
  open(chat);
}

export const remove = (chat) => kept.set(JSON.stringify(all().filter(({ id }) => id !== chat.id)));

export const title = ({ turns }) => (turns[0]?.question ?? "New chat").replace(/\s+/g, " ").slice(0, 60);
