// Bundles the package and the demo's page, and prints the package's size. With `--types` it writes the types as well.
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';
import { bundle, common, here } from './bundle.mjs';

/**
 * What the package may weigh on the wire. The tables that it shares with the Python clients are 600 of it; requests without
 * a session (2026-07-28) are 3,000: keys, tasks, rounds and subscriptions are another protocol than sessions. The words of
 * -31001 are 200.
 */
const MOST = 10_200;

process.chdir(here);
await bundle('dist');
// A copy of this folder elsewhere has no page beside it.
if (existsSync('../../examples/page/page.ts'))
  await build({
    ...common,
    entryPoints: ['../../examples/page/page.ts'],
    outfile: '../../examples/page/dist/page.js',
    alias: { perdure: './src/index.ts' },
    nodePaths: ['node_modules'],
  });
const size = gzipSync(readFileSync('dist/perdure.js'), { level: 9 }).length;
console.log(`perdure.js: ${size} bytes gzipped`);
if (size > MOST) {
  console.error(`perdure.js: more than ${MOST} bytes`);
  process.exitCode = 1;
}
if (process.argv.includes('--types'))
  execFileSync(process.execPath, ['node_modules/typescript/bin/tsc', '-p', 'tsconfig.types.json'], { stdio: 'inherit' });
