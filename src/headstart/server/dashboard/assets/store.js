// Values in the browser's storage. Where that is blocked, they last as long as the page.

/** `kind`: the name of a Storage. */
export function store(kind, name) {
  let here = null;
  const attempt = (work) => {
    try {
      return work(globalThis[kind]);
    } catch {
      return null;
    }
  };
  return {
    get: () => attempt((kept) => kept.getItem(name)) ?? here,
    set(value) {
      here = value;
      attempt((kept) => kept.setItem(name, value));
    },
    forget() {
      here = null;
      attempt((kept) => kept.removeItem(name));
    },
  };
}
