// Chromium, driven by JSON lines: {n, do, …} comes in on stdin, {n, value} or {n, error} goes out on stdout.
// Serves the page of the tests as well, so that it is there while the MCP server is not.
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const browserPackage = createRequire(here('../../clients/browser/package.json'));
const { chromium } = browserPackage('playwright-core');
const { build } = browserPackage('esbuild');
const { bundle } = await import('../../clients/browser/bundle.mjs');
const [path, cachingPath, profile] = process.argv.slice(2);

// The package as it is shipped, and the page on it; each SDK is loaded by the pages that use it.
const shipped = `${profile}/package`;
await bundle(shipped);
const settings = {
  bundle: true,
  minify: true,
  format: 'esm',
  target: 'es2022',
  write: false,
  outdir: '/',
  alias: { perdure: `${shipped}/perdure.js` },
  nodePaths: [here('../../clients/browser/node_modules')],
  logLevel: 'error',
};
const built = await build({ ...settings, entryPoints: [here('page.ts')], splitting: true });
const scripts = new Map(built.outputFiles.map(({ path, text }) => [path, text]));
const page = '<!doctype html><title>page</title><script type=module src=/page.js></script>';
const site = createServer(({ url }, response) => {
  // Cached, as on a real site; and who is not to be stored is not kept for the way back either.
  const answer = (type, text) =>
    response.writeHead(200, { 'content-type': type, 'cache-control': 'max-age=3600' }).end(text);
  const script = scripts.get(url);
  if (script) answer('text/javascript', script);
  else if (url.startsWith('/?')) answer('text/html', page);
  else answer('text/html', '<!doctype html><title>blank</title>');
});
await new Promise((resolve) => site.listen(0, '127.0.0.1', resolve));
const { port } = site.address();

const launch = (executablePath, name) =>
  chromium.launchPersistentContext(`${profile}/${name}`, {
    executablePath,
    headless: true,
    ignoreDefaultArgs: ['--disable-back-forward-cache'],
    args: [
      '--no-sandbox',
      '--disable-gpu',
      '--in-process-gpu', // one process less for each browser
      '--disable-background-networking',
      '--disable-component-update',
      '--disable-sync',
      '--host-resolver-rules=MAP plain.test 127.0.0.1',
    ],
  });
const ordinary = await launch(path, 'profile');
let caching; // started by the first test that needs the cache for the way back
let context = ordinary;
let responses = [];
const tabs = [];

async function watch(tab) {
  const network = await context.newCDPSession(tab);
  const methods = new Map();
  network.on('Network.requestWillBeSent', ({ requestId, request }) => methods.set(requestId, request.method));
  network.on('Network.responseReceived', ({ requestId, type, response }) =>
    responses.push([methods.get(requestId), type, response.mimeType, response.url]),
  );
  await network.send('Network.enable');
  tab.on('pageerror', (error) => console.error(String(error)));
  tab.on('console', (message) => message.type() === 'error' && console.error(message.text()));
  return tabs.push(tab) - 1;
}

const commands = {
  async window({ private: alone, caches }) {
    const browser = caches && cachingPath !== path ? (caching ??= await launch(cachingPath, 'caching')) : ordinary;
    context = alone ? await browser.browser().newContext() : ordinary;
    context.setDefaultTimeout(20_000);
    responses = [];
  },
  async clear() {
    if (context !== ordinary) return context.close();
    for (const tab of ordinary.pages()) await tab.close();
  },
  async compile({ code }) {
    const made = await build({ ...settings, stdin: { contents: code, loader: 'ts', resolveDir: here('.') } });
    return made.outputFiles[0].text;
  },
  origin: () => `http://127.0.0.1:${port}`,
  async open({ url, init }) {
    const tab = await context.newPage();
    if (init) await tab.addInitScript(init);
    const number = await watch(tab);
    await tab.goto(url);
    return number;
  },
  eval: ({ tab, code }) => tabs[tab].evaluate(code),
  // Not before the page's script has run: it is what a test talks to.
  reload: async ({ tab }) => void (await tabs[tab].reload({ waitUntil: 'load' })),
  until: async ({ tab, code, timeout }) =>
    void (await tabs[tab].waitForFunction(code, null, { polling: 20, timeout })),
  // The same for a page whose policy forbids `eval`, which Playwright needs to wait in the page.
  async poll({ tab, code, timeout }) {
    for (const end = Date.now() + timeout; Date.now() < end; await new Promise((resolve) => setTimeout(resolve, 20)))
      if (await tabs[tab].evaluate(code).catch((error) => !/context was destroyed/.test(error) && Promise.reject(error))) return;
    throw new Error(`not true after ${timeout} ms: ${code}\n${await tabs[tab].evaluate('document.body.innerText.slice(0, 2000)')}`);
  },
  async duplicate({ tab }) {
    const [copy] = await Promise.all([context.waitForEvent('page'), tabs[tab].evaluate('void window.open(location.href)')]);
    await copy.waitForLoadState();
    return watch(copy);
  },
  offline: ({ on }) => context.setOffline(on),
  close: ({ tab }) => tabs[tab].close(),
  goto: async ({ tab, url }) => void (await tabs[tab].goto(url)),
  back: async ({ tab }) => void (await tabs[tab].goBack({ waitUntil: 'commit' })),
  async freeze({ tab, on }) {
    const lifecycle = await context.newCDPSession(tabs[tab]);
    await lifecycle.send('Page.setWebLifecycleState', { state: on ? 'frozen' : 'active' });
  },
  press: ({ tab, key }) => tabs[tab].keyboard.press(key),
  hover: ({ tab, selector }) => tabs[tab].hover(selector),
  responses: () => responses,
  resize: ({ tab, width, height }) => tabs[tab].setViewportSize({ width, height }),
  async shoot({ tab, path, width, height, dark, fullPage = true }) {
    await tabs[tab].setViewportSize({ width, height });
    await tabs[tab].emulateMedia({ colorScheme: dark ? 'dark' : 'light' });
    await tabs[tab].screenshot({ path, fullPage });
  },
};

const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
say({ ready: true });
for await (const line of createInterface({ input: process.stdin })) {
  const { n, do: name, ...rest } = JSON.parse(line);
  Promise.resolve()
    .then(() => commands[name](rest))
    .then((value) => say({ n, value: value ?? null }), (error) => say({ n, error: String(error) }));
}
await Promise.all([ordinary.close(), caching?.close()]);
site.close();
