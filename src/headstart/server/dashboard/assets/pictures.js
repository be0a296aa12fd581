// Pictures that are pasted or dropped into the chat, until the next question takes them along.

import { find, make } from "./page.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SIDE = 96; // pixels of a preview
let pictures = []; // {url, preview}
let allowed = false;
const place = make("div", { class: "pictures", role: "group", "aria-label": "Pictures", hidden: true });

/** Accept pictures, or leave them to the browser. */
export function allow(yes) {
  allowed = yes;
}

/** The pictures, each a data URL and its preview. They are then gone from the form. */
export function take() {
  const taken = pictures;
  pictures = [];
  show();
  return taken;
}

async function add(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  // A canvas and not an image: the page's policy lets no address of a picture into it but the server's.
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const size = { width: Math.ceil(bitmap.width * scale), height: Math.ceil(bitmap.height * scale) };
  const preview = make("canvas", { ...size, role: "img", "aria-label": file.name || "pasted picture" });
  preview.getContext("2d").drawImage(bitmap, 0, 0, size.width, size.height);
  bitmap.close();
  pictures.push({ url, preview });
  show();
}

function show() {
  place.replaceChildren(
    ...pictures.map((picture) => {
      const remove = make("button", { type: "button", title: "Remove this picture" }, picture.preview);
      remove.addEventListener("click", () => {
        pictures = pictures.filter((each) => each !== picture);
        show();
      });
      return remove;
    }),
  );
  place.hidden = !pictures.length;
}

/** Take the pictures of what was pasted or dropped; all else is the browser's. */
function receive(event, data) {
  const files = [...(data?.files ?? [])].filter((file) => TYPES.includes(file.type));
  if (!allowed || !files.length) return;
  event.preventDefault();
  for (const file of files) add(file).catch(() => (find("heard").textContent = `${file.name}: not a picture`));
}

find("ask").prepend(place);
find("question").addEventListener("paste", (event) => receive(event, event.clipboardData));
for (const id of ["thread", "ask"]) {
  find(id).addEventListener("dragover", (event) => allowed && event.preventDefault());
  find(id).addEventListener("drop", (event) => receive(event, event.dataTransfer));
}
