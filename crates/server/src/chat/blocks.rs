//! An answer as blocks: thoughts, texts and tool calls, one after the other.

use crate::output::Piece;

/// What an answer consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    Reasoning(String),
    Text(String),
    Call(Call),
}

/// A tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON as the model wrote it.
    pub(crate) arguments: String,
}

/// What happens to the blocks of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockEvent<'a> {
    /// A block begins, with nothing in it.
    Opened(&'a Block),
    /// The open block gets more.
    Grown(&'a Block, &'a str),
    /// The open block is whole.
    Closed(&'a Block),
}

/// The blocks of one answer as they come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks {
    blocks: Vec<Block>,
    /// Whether the last one may still grow.
    is_open: bool,
}

impl Block {
    fn grow(&mut self, more: &str) {
        match self {
            Self::Reasoning(text) | Self::Text(text) => *text += more,
            Self::Call(call) => call.arguments += more,
        }
    }
}

impl Blocks {
    /// The blocks of a whole answer. `call_id` makes an id for each call.
    pub(crate) fn of(pieces: Vec<Piece>, call_id: impl Fn() -> String) -> Vec<Block> {
        let mut blocks = Self::default();
        for piece in pieces {
            blocks.push(piece, &call_id, &mut |_, _| {});
        }
        blocks.blocks
    }

    /// Takes a piece; `tell` hears what happens, and the place of the block to which it does.
    pub(crate) fn push(
        &mut self,
        piece: Piece,
        call_id: impl Fn() -> String,
        tell: &mut dyn FnMut(usize, BlockEvent<'_>),
    ) {
        let (opens, more) = match piece {
            Piece::Reasoning(text) => (Block::Reasoning(String::new()), text),
            Piece::Text(text) => (Block::Text(String::new()), text),
            Piece::Call { name } => {
                let call = Call { id: call_id(), name, arguments: String::new() };
                return self.open(Block::Call(call), tell);
            }
            Piece::Arguments(text) => return self.grow(&text, tell),
        };
        let goes_on = match (self.blocks.last(), &opens) {
            (Some(last), opens) => std::mem::discriminant(last) == std::mem::discriminant(opens),
            (None, _) => false,
        };
        if !(self.is_open && goes_on) {
            self.open(opens, tell);
        }
        self.grow(&more, tell);
    }

    /// Ends the answer.
    pub(crate) fn close(&mut self, tell: &mut dyn FnMut(usize, BlockEvent<'_>)) {
        if let Some(last) = self.blocks.last().filter(|_| self.is_open) {
            tell(self.blocks.len() - 1, BlockEvent::Closed(last));
        }
        self.is_open = false;
    }

    /// All blocks so far.
    pub(crate) fn all(&self) -> &[Block] {
        &self.blocks
    }

    /// Begins a block, after the one that is open.
    pub(crate) fn open(&mut self, block: Block, tell: &mut dyn FnMut(usize, BlockEvent<'_>)) {
        self.close(tell);
        tell(self.blocks.len(), BlockEvent::Opened(&block));
        self.blocks.push(block);
        self.is_open = true;
    }

    fn grow(&mut self, more: &str, tell: &mut dyn FnMut(usize, BlockEvent<'_>)) {
        let index = self.blocks.len() - 1;
        let last = self.blocks.last_mut().expect("a block was opened");
        last.grow(more);
        tell(index, BlockEvent::Grown(last, more));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_open_grow_and_close() {
        let text = |text: &str| Piece::Text(text.to_owned());
        let call = Piece::Call { name: "f".to_owned() };
        let pieces = [text("a"), text("b"), call, Piece::Arguments("{}".to_owned()), text("c")];
        let (mut blocks, mut log) = (Blocks::default(), Vec::new());
        let mut tell = |index: usize, event: BlockEvent<'_>| {
            log.push(match event {
                BlockEvent::Opened(_) => format!("{index} opened"),
                BlockEvent::Grown(_, more) => format!("{index} {more}"),
                BlockEvent::Closed(_) => format!("{index} closed"),
            });
        };
        for piece in pieces.clone() {
            blocks.push(piece, || "id".to_owned(), &mut tell);
        }
        blocks.close(&mut tell);
        let expected = [
            "0 opened", "0 a", "0 b", "0 closed", "1 opened", "1 {}", "1 closed", "2 opened",
            "2 c", "2 closed",
        ];
        assert_eq!(log, expected);
        let whole = Blocks::of(pieces.to_vec(), || "id".to_owned());
        assert_eq!(blocks.all(), whole);
        assert_eq!(whole[0], Block::Text("ab".to_owned()));
    }
}
