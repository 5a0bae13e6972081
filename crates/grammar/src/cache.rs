//! The grammars compiled last.

use std::collections::VecDeque;

use inflight_engine::SharedGrammar;

/// Most grammars that are kept: each may take some megabytes.
const MAX_GRAMMARS: usize = 32;

/// The grammars compiled last, latest used first.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    grammars: VecDeque<(String, SharedGrammar)>,
}

impl Cache {
    pub(crate) fn get(&mut self, key: &str) -> Option<SharedGrammar> {
        let found = self.grammars.iter().position(|(known, _)| known == key)?;
        let entry = self.grammars.remove(found)?;
        let grammar = entry.1.clone();
        self.grammars.push_front(entry);
        Some(grammar)
    }

    pub(crate) fn insert(&mut self, key: String, grammar: SharedGrammar) {
        self.grammars.push_front((key, grammar));
        self.grammars.truncate(MAX_GRAMMARS);
    }
}
