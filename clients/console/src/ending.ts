// Ends a session after a question.
import { api, type Session } from './api.ts';
import { h, say } from './dom.ts';
import { short } from './format.ts';

const CONSEQUENCES: Readonly<Record<string, string>> = {
  session: 'Its running calls are cancelled, its log is deleted, and its client must open a new session. This cannot be undone.',
  task: 'It is cancelled if it runs; its client gets that as its answer. This cannot be undone.',
  call: 'It is cancelled if it runs; its client gets that as its answer. This cannot be undone.',
};

/** Ask, and end it if the person says so. `onSaid` gets what the console said of it. */
export function askToEnd(session: Session, onSaid: (text: string) => void): void {
  const trouble = h('p', { class: 'trouble', role: 'alert' });
  const cancel = h('button', { type: 'button', click: () => dialog.close() }, 'Keep it');
  const end = h('button', { type: 'button', class: 'danger', click: () => void work() }, `End this ${session.kind}`);
  const dialog = h(
    'dialog',
    { 'aria-labelledby': 'end-title', close: () => dialog.remove() },
    h('h2', { id: 'end-title' }, `End ${session.kind} `, h('code', {}, short(session.id)), '?'),
    h('p', {}, CONSEQUENCES[session.kind] ?? ''),
    trouble,
    h('div', { class: 'buttons' }, cancel, end),
  );

  async function work(): Promise<void> {
    end.disabled = cancel.disabled = true;
    say(trouble, '');
    try {
      const { said } = await api.end(session.id);
      dialog.close();
      onSaid(said.replaceAll(session.id, short(session.id)));
    } catch (error) {
      end.disabled = cancel.disabled = false;
      say(trouble, error instanceof Error ? error.message : String(error));
    }
  }

  document.body.append(dialog);
  dialog.showModal();
  cancel.focus();
}
