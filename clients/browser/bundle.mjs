// How the package is bundled: for the build, and for the tests, which run what is shipped.
import { mkdir, writeFile } from 'node:fs/promises';
import { basename, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { minify } from 'terser';

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

/**
 * Names that only our own modules know, and that need not reach the page in full. None of them may be public, stored,
 * or a name of the platform's.
 */
const OURS = `
  again answered attempts awake begin broken closed end enter envelope feed goes hand hasPosition hasTasks heard isCut isStream
  keeps kept leave leaving line lines look lost mayRenew offers offline onopen onposition over page park parked pause proven ready
  recovered release renewing report resumed retry running saysWhen settle single slots state take taken troubled
`;

export async function bundle(outdir) {
  const { outputFiles } = await build({
    ...common,
    entryPoints: { perdure: 'src/index.ts' },
    outdir,
    splitting: true,
    chunkNames: '[name]',
    mangleProps: new RegExp(`^(${OURS.trim().split(/\s+/).join('|')})$`),
    write: false,
  });
  await mkdir(outdir, { recursive: true });
  for (const { path, text } of outputFiles) {
    // It does better on what esbuild has made than either of them alone, by a fortieth.
    const { code } = await minify(text, { module: true, ecma: 2022, compress: { passes: 3, unsafe_arrows: true } });
    await writeFile(join(outdir, basename(path)), code);
  }
}
