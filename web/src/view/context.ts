import { createContext } from "svelte";
import type { Controller } from "../app/controller";
import type { Store } from "../state/store.svelte";

/** What every view reads from and sends intents to. */
export interface AppContext {
  store: Store;
  controller: Controller;
}

export const [getApp, setApp] = createContext<AppContext>();
