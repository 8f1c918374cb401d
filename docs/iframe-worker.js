// A page that is read from a file may start no Worker, in which the theme searches: there the Worker's
// code runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.onerror = message => this.dispatchEvent(new ErrorEvent("error", { message }));
      const script = frame.contentDocument.createElement("script");
      this.loaded = new Promise(loaded => (script.onload = loaded));
      script.src = new URL(url, location.href);
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
