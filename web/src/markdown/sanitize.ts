/** The second fence behind the renderer: only these tags and attributes reach the page, whatever the text was. */
import DOMPurify from "dompurify";

const TAGS =
  "a blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul";

/** Attributes whose values are no addresses, and so need not look like one. */
const PLAIN_ATTRIBUTES = ["class", "data-copy", "rel", "start", "target", "type"];

const CONFIG = {
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: [...PLAIN_ATTRIBUTES, "href"],
  ADD_URI_SAFE_ATTR: PLAIN_ATTRIBUTES,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
};

export function sanitize(html: string): string {
  return DOMPurify.sanitize(html, CONFIG);
}
