import { mount } from "svelte";
import { Controller } from "./app/controller";
import { loadDrafts } from "./app/drafts";
import { applyRememberedTheme } from "./app/theme";
import { Store } from "./state/store.svelte";
import "./style/base.css";
import "./style/markdown.css";
import { language } from "./strings";
import App from "./view/App.svelte";

applyRememberedTheme();
document.documentElement.lang = language;

const store = new Store(loadDrafts());
const controller = new Controller(store);
const target = document.getElementById("app");
if (target === null) throw new Error("the page has no #app element");
mount(App, { target, props: { store, controller } });
controller.start();
