/** Collects items and hands them over once per animation frame; in a hidden tab, where frames stop, by a timer. */
const HIDDEN_MS = 250;

export class FrameBatch<T> {
  #items: T[] = [];
  #frame = 0;
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly apply: (items: readonly T[]) => void) {}

  add(item: T): void {
    this.#items.push(item);
    if (this.#items.length > 1) return;
    this.#frame = requestAnimationFrame(() => this.#flush());
    this.#timer = setTimeout(() => this.#flush(), HIDDEN_MS);
  }

  #flush(): void {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#timer);
    const items = this.#items;
    this.#items = [];
    if (items.length > 0) this.apply(items);
  }
}
