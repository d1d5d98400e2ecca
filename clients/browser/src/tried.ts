/** What it gives, or nothing if it throws. */
export function tried<T>(what: () => T, otherwise?: (error: unknown) => void): T | undefined {
  try {
    return what();
  } catch (error) {
    otherwise?.(error);
    return undefined;
  }
}
