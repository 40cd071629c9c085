import type { Action } from "./actions";
import { initialState, type State } from "./model";
import { reduce } from "./reduce";

export type Listener = (state: State, before: State) => void;

/** The page's one state. Views read `state`; every change is a dispatched action. */
export class Store {
  #state: State = $state.raw(initialState);
  readonly #listeners: Listener[] = [];

  constructor(drafts: Readonly<Record<string, string>>) {
    this.#state = { ...initialState, drafts };
  }

  get state(): State {
    return this.#state;
  }

  /** Applies the actions as one change: views and listeners see only the result. */
  dispatch(...actions: Action[]): void {
    const before = this.#state;
    this.#state = actions.reduce(reduce, before);
    if (this.#state !== before) for (const listener of this.#listeners) listener(this.#state, before);
  }

  subscribe(listener: Listener): void {
    this.#listeners.push(listener);
  }
}
