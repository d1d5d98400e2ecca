// Bundles the package, writes its types and prints its size.
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';

process.chdir(fileURLToPath(new URL('.', import.meta.url)));
const common = { bundle: true, format: 'esm', target: 'es2022', legalComments: 'none', logLevel: 'warning' };
await build({ ...common, entryPoints: ['src/index.ts'], outfile: 'dist/perdure.js', minify: true, sourcemap: true });
const size = gzipSync(readFileSync('dist/perdure.js'), { level: 9 }).length;
console.log(`perdure.js: ${size} bytes gzipped`);
const most = 6 * 1024;
if (size > most) {
  console.error(`perdure.js: more than ${most} bytes`);
  process.exitCode = 1;
}
if (process.argv.includes('--types'))
  execFileSync('node', ['node_modules/typescript/bin/tsc', '-p', 'tsconfig.types.json'], { stdio: 'inherit' });
