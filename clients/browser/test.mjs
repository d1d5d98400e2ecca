// The unit tests under node's own runner.
import { spawnSync } from 'node:child_process';
import { readdirSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const here = fileURLToPath(new URL('.', import.meta.url));
process.chdir(here);
const tests = readdirSync('test').filter((name) => name.endsWith('.test.ts'));
await build({
  absWorkingDir: here,
  entryPoints: tests.map((name) => `test/${name}`),
  outdir: 'build/test',
  bundle: true,
  format: 'esm',
  platform: 'node',
  logLevel: 'warning',
});
const files = tests.map((name) => `build/test/${name.replace(/ts$/, 'js')}`);
process.exit(spawnSync(process.execPath, ['--test', ...files], { stdio: 'inherit' }).status ?? 1);
