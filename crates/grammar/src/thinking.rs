//! Models that think first: their thoughts are free, for as long as they may last; what follows is
//! not, if something is asked of it.

use std::sync::Arc;

use inflight_engine::{Allowed, Grammar, Matcher, SharedGrammar};

/// How a model's thoughts are told from its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thinking {
    /// The token that begins them, if the model may write it itself.
    pub start: Option<u32>,
    /// The token that ends them.
    pub end: u32,
    /// Whether the prompt already began them.
    pub is_open: bool,
    /// Most tokens of them, marks not counted; then they must end. `None`: any number.
    pub budget: Option<u64>,
}

/// What `answer` allows (`None`: anything), after thoughts that may be anything.
pub fn after_thinking(answer: Option<SharedGrammar>, thinking: Thinking) -> SharedGrammar {
    SharedGrammar(Arc::new(AfterThinking { answer, thinking }))
}

#[derive(Debug)]
struct AfterThinking {
    answer: Option<SharedGrammar>,
    thinking: Thinking,
}

impl Grammar for AfterThinking {
    fn start(&self) -> Box<dyn Matcher> {
        let place = match (self.thinking.is_open, self.thinking.start) {
            (true, _) => Place::Thoughts,
            (false, Some(_)) => Place::Start,
            (false, None) => Place::Answer,
        };
        let answer = self.answer.as_ref().map(|answer| answer.0.start());
        Box::new(ThinkingMatcher { place, thinking: self.thinking, num_thoughts: 0, answer })
    }
}

/// Where an output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Thoughts or the answer may begin.
    Start,
    Thoughts,
    Answer,
}

struct ThinkingMatcher {
    place: Place,
    thinking: Thinking,
    /// Tokens of the thoughts so far.
    num_thoughts: u64,
    answer: Option<Box<dyn Matcher>>,
}

impl Matcher for ThinkingMatcher {
    fn advance(&mut self, token: u32) -> Result<(), String> {
        self.place = match self.place {
            Place::Start if self.thinking.start == Some(token) => Place::Thoughts,
            Place::Thoughts if self.thinking.end == token => Place::Answer,
            Place::Thoughts => {
                self.num_thoughts += 1;
                Place::Thoughts
            }
            Place::Start | Place::Answer => {
                if let Some(answer) = &mut self.answer {
                    answer.advance(token)?;
                }
                Place::Answer
            }
        };
        Ok(())
    }

    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String> {
        if self.place == Place::Thoughts {
            if self.thinking.budget.is_none_or(|budget| self.num_thoughts < budget) {
                return Ok(Allowed::All);
            }
            mask.fill(0);
            if let Some(word) = mask.get_mut(self.thinking.end as usize / 32) {
                *word = 1 << (self.thinking.end % 32);
            }
            return Ok(Allowed::Masked);
        }
        let Some(answer) = &mut self.answer else { return Ok(Allowed::All) };
        let allowed = answer.allowed(mask)?;
        if let (Place::Start, Allowed::Masked, Some(start)) =
            (self.place, allowed, self.thinking.start)
            && let Some(word) = mask.get_mut(start as usize / 32)
        {
            *word |= 1 << (start % 32);
        }
        Ok(allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows token 3 alone, once.
    #[derive(Debug)]
    struct Three;
    struct ThreeMatcher(bool);

    impl Grammar for Three {
        fn start(&self) -> Box<dyn Matcher> {
            Box::new(ThreeMatcher(false))
        }
    }

    impl Matcher for ThreeMatcher {
        fn advance(&mut self, token: u32) -> Result<(), String> {
            self.0 = true;
            if token == 3 { Ok(()) } else { Err(format!("{token}")) }
        }

        fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String> {
            mask[0] = 1 << 3;
            Ok(if self.0 { Allowed::Nothing } else { Allowed::Masked })
        }
    }

    fn next(matcher: &mut dyn Matcher) -> (Allowed, u32) {
        let mut mask = [0];
        (matcher.allowed(&mut mask).unwrap(), mask[0])
    }

    fn start(start: Option<u32>, is_open: bool) -> Box<dyn Matcher> {
        let thinking = Thinking { start, end: 8, is_open, budget: None };
        after_thinking(Some(SharedGrammar(Arc::new(Three))), thinking).0.start()
    }

    #[test]
    fn thoughts_that_the_prompt_began_are_free_until_their_end() {
        let mut matcher = start(None, true);
        for token in [3, 5, 7] {
            assert_eq!(next(&mut *matcher).0, Allowed::All);
            matcher.advance(token).unwrap();
        }
        matcher.advance(8).unwrap();
        assert_eq!(next(&mut *matcher), (Allowed::Masked, 1 << 3));
        matcher.advance(3).unwrap();
        assert_eq!(next(&mut *matcher).0, Allowed::Nothing);
    }

    #[test]
    fn thoughts_end_when_their_budget_is_spent() {
        for (begins, is_open) in [(None, true), (Some(7), false)] {
            let thinking = Thinking { start: begins, end: 8, is_open, budget: Some(2) };
            let mut matcher = after_thinking(None, thinking).0.start();
            assert_eq!(next(&mut *matcher).0, Allowed::All);
            begins.into_iter().for_each(|token| matcher.advance(token).unwrap());
            for token in [3, 5] {
                assert_eq!(next(&mut *matcher).0, Allowed::All);
                matcher.advance(token).unwrap();
            }
            assert_eq!(next(&mut *matcher), (Allowed::Masked, 1 << 8));
            matcher.advance(8).unwrap();
            for token in [1, 2, 3] {
                assert_eq!(next(&mut *matcher).0, Allowed::All, "the answer is free");
                matcher.advance(token).unwrap();
            }
        }
    }

    #[test]
    fn a_model_may_begin_thoughts_or_answer_at_once() {
        let mut matcher = start(Some(7), false);
        assert_eq!(next(&mut *matcher), (Allowed::Masked, 1 << 3 | 1 << 7));
        matcher.advance(7).unwrap();
        assert_eq!(next(&mut *matcher).0, Allowed::All);
        let mut matcher = start(Some(7), false);
        matcher.advance(3).unwrap();
        assert_eq!(next(&mut *matcher).0, Allowed::Nothing);
        assert!(start(Some(7), false).advance(8).is_err());
        assert_eq!(next(&mut *start(None, false)), (Allowed::Masked, 1 << 3));
    }
}
