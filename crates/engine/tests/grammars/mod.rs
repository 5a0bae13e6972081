//! Grammars that know no text, to test the engine with.

#![allow(dead_code, unreachable_pub, reason = "each test uses some of it")]

use std::sync::Arc;

use inflight_engine::{Allowed, Grammar, Matcher, SharedGrammar};

/// Allows a fifth of the vocabulary, which fifth depending on all tokens so far; and, if it has an
/// end, that token alone after so many others.
#[derive(Clone, Debug)]
pub struct Odd {
    seed: u32,
    /// What ends it, after how many tokens.
    end: Option<(u32, usize)>,
}

struct OddMatcher {
    grammar: Odd,
    num_tokens: usize,
    state: u32,
    ended: bool,
}

impl Odd {
    pub fn grammar(seed: u32, end: Option<(u32, usize)>) -> SharedGrammar {
        SharedGrammar(Arc::new(Self { seed, end }))
    }

    /// What is wrong with a whole output, if anything is.
    pub fn check(&self, output: &[u32]) -> Result<(), String> {
        let mut matcher = self.matcher();
        output.iter().try_for_each(|token| matcher.advance(*token))
    }

    pub fn new(seed: u32, end: Option<(u32, usize)>) -> Self {
        Self { seed, end }
    }

    fn matcher(&self) -> OddMatcher {
        OddMatcher { state: self.seed, grammar: self.clone(), num_tokens: 0, ended: false }
    }
}

impl Grammar for Odd {
    fn start(&self) -> Box<dyn Matcher> {
        Box::new(self.matcher())
    }
}

impl OddMatcher {
    fn allows(&self, token: u32) -> bool {
        match self.grammar.end {
            Some((end, after)) if self.num_tokens >= after => token == end,
            Some((end, _)) if token == end => false,
            _ => (token.wrapping_mul(7).wrapping_add(self.state)).is_multiple_of(5),
        }
    }
}

impl Matcher for OddMatcher {
    fn advance(&mut self, token: u32) -> Result<(), String> {
        if self.ended || !self.allows(token) {
            return Err(format!("token {token} after {} others", self.num_tokens));
        }
        self.ended = self.grammar.end.is_some_and(|(end, _)| end == token);
        self.num_tokens += 1;
        self.state = self.state.wrapping_mul(31).wrapping_add(token);
        Ok(())
    }

    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String> {
        if self.ended {
            return Ok(Allowed::Nothing);
        }
        for (i, word) in (0..).zip(mask) {
            *word = (0..32).filter(|bit| self.allows(32 * i + bit)).map(|bit| 1 << bit).sum();
        }
        Ok(Allowed::Masked)
    }
}

/// Allows everything for some tokens, as while a model thinks, and then what another allows.
#[derive(Debug)]
pub struct After(pub usize, pub Odd);

struct AfterMatcher(usize, OddMatcher);

impl Grammar for After {
    fn start(&self) -> Box<dyn Matcher> {
        Box::new(AfterMatcher(self.0, self.1.matcher()))
    }
}

impl Matcher for AfterMatcher {
    fn advance(&mut self, token: u32) -> Result<(), String> {
        match self.0.checked_sub(1) {
            Some(left) => self.0 = left,
            None => self.1.advance(token)?,
        }
        Ok(())
    }

    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String> {
        if self.0 > 0 { Ok(Allowed::All) } else { self.1.allowed(mask) }
    }
}

/// Goes wrong after some tokens, in one way or another.
#[derive(Debug)]
pub struct Broken(pub usize, pub Fault);

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Error,
    Panic,
    AllowsNothing,
}

impl Grammar for Broken {
    fn start(&self) -> Box<dyn Matcher> {
        Box::new(BrokenMatcher(self.0, self.1))
    }
}

struct BrokenMatcher(usize, Fault);

impl Matcher for BrokenMatcher {
    fn advance(&mut self, _: u32) -> Result<(), String> {
        self.0 -= 1;
        Ok(())
    }

    fn allowed(&mut self, _: &mut [u32]) -> Result<Allowed, String> {
        match (self.0, self.1) {
            (0, Fault::Error) => Err("broken".to_owned()),
            (0, Fault::Panic) => panic!("a grammar's own bug"),
            (0, Fault::AllowsNothing) => Ok(Allowed::Masked),
            _ => Ok(Allowed::All),
        }
    }
}
