// Pages from the disk may not start workers, which the search does: there its script runs in a frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.answer = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.frame = new Promise(resolve => { frame.ready = () => resolve(frame.contentWindow) })
      document.body.append(frame)
      const page = frame.contentDocument
      page.open()
      page.write(
        "<script>postMessage = data => frameElement.answer(data)</script>" +
        `<script src="${new URL(script, location)}" onload="frameElement.ready()"></script>`)
      page.close()
    }

    postMessage(data) {
      this.frame.then(frame => frame.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
