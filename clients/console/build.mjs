// Bundles the console's page into the Python package, and prints its size. The tools are those of the browser package.
import { mkdir, readFile, rename, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { basename } from 'node:path';
import { fileURLToPath } from 'node:url';
import { gzipSync } from 'node:zlib';

const here = fileURLToPath(new URL('.', import.meta.url));
const { build } = createRequire(new URL('../browser/package.json', import.meta.url))('esbuild');
const [outdir = `${here}../../src/perdure/console/page`] = process.argv.slice(2);

/** Bytes gzipped: the page is opened on the machine of its server, or through a tunnel to it. */
const MOST = 20_000;

const common = { absWorkingDir: here, outdir, minify: true, write: false, logLevel: 'warning' };
const script = await build({
  ...common,
  entryPoints: { console: 'src/main.ts' },
  bundle: true,
  format: 'esm',
  target: 'es2022',
  legalComments: 'none',
});
const style = await build({ ...common, entryPoints: ['console.css'] });
const files = [...script.outputFiles, ...style.outputFiles].map(({ path, contents }) => [basename(path), contents]);
for (const name of ['index.html', 'icon.svg']) files.push([name, await readFile(`${here}${name}`)]);

await mkdir(outdir, { recursive: true });
for (const [name, contents] of files) {
  // In one step, because a console may be serving it.
  await writeFile(`${outdir}/.${name}.${process.pid}`, contents);
  await rename(`${outdir}/.${name}.${process.pid}`, `${outdir}/${name}`);
}

const size = gzipSync(script.outputFiles[0].contents, { level: 9 }).length;
console.log(`console.js: ${size} bytes gzipped`);
if (size > MOST) {
  console.error(`console.js: more than ${MOST} bytes`);
  process.exitCode = 1;
}
