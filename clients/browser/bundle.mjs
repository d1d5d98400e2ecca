// How the package is bundled: for the build, and for the tests, which run what is shipped.
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

export const here = fileURLToPath(new URL('.', import.meta.url));

export const common = {
  absWorkingDir: here,
  bundle: true,
  format: 'esm',
  target: 'es2022',
  minify: true,
  legalComments: 'none',
  logLevel: 'warning',
};

export const bundle = (outdir) =>
  build({
    ...common,
    entryPoints: { perdure: 'src/index.ts' },
    outdir,
    splitting: true,
    chunkNames: '[name]',
    sourcemap: true,
  });
