//! Blocks of key-value memory, and the tree in which their contents are looked up.
//!
//! Every block in use is a node: its tokens continue those of its parent, so the path from the root
//! spells a prefix. Nodes of finished sequences stay as a cache until their memory is needed.
//! Lookups compare tokens, never hashes.
//!
//! ```text
//! free  --allocate-->  used, filling  --full-->  used, shared by any number of sequences
//!   ^                     |                          |
//!   |                  release                    release
//!   +--discard (LRU) --  cached: found by its tokens, evicted when blocks are needed
//! ```
//!
//! Invariants: only a full block has children; a block in use by a sequence has all its ancestors
//! in use; only full blocks are shared between sequences, so a partly filled block has at most one
//! writer, and its first slots never change while it lives; a lookup finds only nodes of its own space, and
//! none of a space that has ended (weights that were replaced).

use crate::forward::BlockId;
use sinew_types::TokenId;
use std::collections::{BTreeSet, HashMap};

/// Number of the weights that keys and values come from: an adapter, or no adapter, on one version of the
/// engine's own weights. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Space(pub(crate) u64);

/// The node above a block. A root for each space keeps the contents of different weights apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Parent {
    Root(Space),
    Block(BlockId),
}

/// A block in use or in the cache.
#[derive(Clone, Debug)]
struct Node {
    parent: Parent,
    /// Weights that its keys and values come from.
    space: Space,
    /// First token of the node, the key under which its parent finds it.
    first: TokenId,
    /// Tokens of the filled slots, those that the current pass computes included.
    tokens: Vec<TokenId>,
    /// Filled slots whose keys and values are stored.
    ready: usize,
    /// Sequences (and pins of the current pass) that need the block.
    refs: u32,
    /// Number of nodes below it; only a node without any can be evicted.
    children: u32,
    /// Pass of the last release; orders eviction.
    last_used: u64,
}

/// The result of a lookup: blocks that hold the first tokens of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PrefixMatch {
    /// Full blocks, in order.
    pub(crate) full: Vec<BlockId>,
    /// A further block of which the first slots match, and how many.
    pub(crate) tail: Option<(BlockId, usize)>,
}

impl PrefixMatch {
    /// Number of tokens found.
    pub(crate) fn tokens(&self, block_tokens: usize) -> usize {
        self.full.len() * block_tokens + self.tail.map_or(0, |(_, n)| n)
    }
}

/// Allocator, reference counts and prefix tree of all blocks.
#[derive(Debug)]
pub(crate) struct Blocks {
    block_tokens: usize,
    /// Indexed by block; `None` is free.
    nodes: Vec<Option<Node>>,
    /// Blocks that hold nothing.
    free: Vec<BlockId>,
    /// Nodes below a parent, by their first token.
    children: HashMap<(Parent, TokenId), Vec<BlockId>>,
    /// Unused nodes without children, by last use: the next to be evicted comes first.
    evictable: BTreeSet<(u64, BlockId)>,
    /// Unused nodes. All can be evicted, leaves first.
    idle: usize,
    /// Spaces of weights that sample now.
    live: BTreeSet<Space>,
    /// Number of the next space.
    next_space: u64,
    /// Number of the pass; orders evictions.
    tick: u64,
}

impl Blocks {
    pub(crate) fn new(blocks: usize, block_tokens: usize) -> Self {
        Self {
            block_tokens,
            nodes: vec![None; blocks],
            free: (0..blocks as BlockId).rev().collect(),
            children: HashMap::new(),
            evictable: BTreeSet::new(),
            idle: 0,
            live: BTreeSet::new(),
            next_space: 0,
            tick: 0,
        }
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Number of blocks that can be allocated: free ones, and cached ones that no sequence uses.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.idle
    }

    pub(crate) fn total(&self) -> usize {
        self.nodes.len()
    }

    fn node(&self, block: BlockId) -> &Node {
        let node = self.nodes[block as usize].as_ref();
        node.expect("a block that is referred to is in use")
    }

    fn node_mut(&mut self, block: BlockId) -> &mut Node {
        let node = self.nodes[block as usize].as_mut();
        node.expect("a block that is referred to is in use")
    }

    /// Filled slots of `block`, those being computed included.
    pub(crate) fn filled(&self, block: BlockId) -> usize {
        self.node(block).tokens.len()
    }

    /// Whether a sequence (or a pin) uses `block`.
    pub(crate) fn is_used(&self, block: BlockId) -> bool {
        self.node(block).refs > 0
    }

    /// Blocks below `parent` that begin with the first of `rest`, with the number of tokens
    /// that they share with it and how many of those are stored.
    pub(crate) fn candidates<'a>(
        &'a self,
        parent: Parent,
        rest: &'a [TokenId],
    ) -> impl Iterator<Item = (BlockId, usize, usize)> + 'a {
        let first = rest.first();
        let found = first.and_then(|&first| self.children.get(&(parent, first)));
        found.into_iter().flatten().map(move |&block| {
            let node = self.node(block);
            let pairs = node.tokens.iter().zip(rest);
            let shared = pairs.take_while(|(a, b)| a == b).count();
            (block, shared, shared.min(node.ready))
        })
    }

    /// The longest stored prefix of `tokens` below `root`, in time linear in its length.
    pub(crate) fn find(&self, root: Parent, tokens: &[TokenId]) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        let mut parent = root;
        let mut rest = tokens;
        loop {
            let best = self
                .candidates(parent, rest)
                .max_by_key(|&(block, _, ready)| (ready, std::cmp::Reverse(block)));
            match best {
                Some((block, _, ready)) if ready == self.block_tokens => {
                    found.full.push(block);
                    parent = Parent::Block(block);
                    rest = &rest[ready..];
                }
                Some((block, _, ready)) if ready > 0 => {
                    found.tail = Some((block, ready));
                    return found;
                }
                _ => return found,
            }
        }
    }

    /// Allocates a block for a node below `parent`, in use once, with `tokens` in its first slots (at least
    /// one). Evicts the least recently used cached block if none is free.
    pub(crate) fn allocate(&mut self, parent: Parent, tokens: &[TokenId]) -> Option<BlockId> {
        debug_assert!(!tokens.is_empty() && tokens.len() <= self.block_tokens);
        if self.free.is_empty() {
            let &(_, victim) = self.evictable.first()?;
            self.discard(victim);
        }
        let block = self.free.pop()?;
        let mut stored = Vec::with_capacity(self.block_tokens);
        stored.extend_from_slice(tokens);
        let space = match parent {
            Parent::Root(space) => space,
            Parent::Block(above) => {
                let above = self.node_mut(above);
                above.children += 1;
                above.space
            }
        };
        self.nodes[block as usize] = Some(Node {
            parent,
            space,
            first: tokens[0],
            tokens: stored,
            ready: 0,
            refs: 1,
            children: 0,
            last_used: self.tick,
        });
        let siblings = self.children.entry((parent, tokens[0])).or_default();
        siblings.push(block);
        Some(block)
    }

    /// Adds tokens to the block's free slots. The caller is its only writer.
    ///
    /// # Panics
    /// If they do not fit.
    pub(crate) fn append(&mut self, block: BlockId, tokens: &[TokenId]) {
        let free = self.block_tokens - self.filled(block);
        assert!(tokens.len() <= free, "block {block} has {free} free slots");
        self.node_mut(block).tokens.extend_from_slice(tokens);
    }

    /// Empties the slots from `slots` on. The caller is the block's only writer.
    pub(crate) fn truncate(&mut self, block: BlockId, slots: usize) {
        let node = self.node_mut(block);
        node.tokens.truncate(slots);
        node.ready = node.ready.min(slots);
    }

    /// Marks the keys and values of all filled slots as stored.
    pub(crate) fn mark_ready(&mut self, block: BlockId) {
        let node = self.node_mut(block);
        node.ready = node.tokens.len();
    }

    /// Adds a user.
    pub(crate) fn retain(&mut self, block: BlockId) {
        let node = self.node_mut(block);
        node.refs += 1;
        if node.refs == 1 {
            let key = (node.last_used, block);
            self.evictable.remove(&key);
            self.idle -= 1;
        }
    }

    /// Removes a user. An unused block stays as a cache, unless its weights are gone or nothing is
    /// stored in it. A path is released from its end.
    pub(crate) fn release(&mut self, block: BlockId) {
        let tick = self.tick;
        let live = self.live.contains(&self.node(block).space);
        let node = self.node_mut(block);
        node.refs = node
            .refs
            .checked_sub(1)
            .expect("released once for each user");
        if node.refs > 0 {
            return;
        }
        node.last_used = tick;
        // Slots that were to be computed hold nothing.
        node.tokens.truncate(node.ready);
        let useless = !live || node.ready == 0;
        let leaf = node.children == 0;
        self.idle += 1;
        if leaf {
            self.evictable.insert((tick, block));
            if useless {
                self.discard(block);
            }
        }
    }

    /// Frees an unused leaf; returns its parent if that has become one.
    fn discard(&mut self, block: BlockId) -> Option<BlockId> {
        let node = self.nodes[block as usize].take();
        let node = node.expect("an evictable block is in use");
        debug_assert!(node.refs == 0 && node.children == 0);
        self.evictable.remove(&(node.last_used, block));
        self.idle -= 1;
        self.free.push(block);
        self.unlink(block, (node.parent, node.first));
        let Parent::Block(above) = node.parent else {
            return None;
        };
        let parent = self.node_mut(above);
        parent.children -= 1;
        if parent.children > 0 || parent.refs > 0 {
            return None;
        }
        let key = (parent.last_used, above);
        self.evictable.insert(key);
        Some(above)
    }

    fn unlink(&mut self, block: BlockId, key: (Parent, TokenId)) {
        if let Some(siblings) = self.children.get_mut(&key) {
            siblings.retain(|&b| b != block);
            if siblings.is_empty() {
                self.children.remove(&key);
            }
        }
    }

    /// Advances the clock of the eviction order; once per pass.
    pub(crate) fn advance(&mut self) {
        self.tick += 1;
    }

    /// Begins a space for new weights.
    pub(crate) fn start_space(&mut self) -> Space {
        let space = Space(self.next_space);
        self.next_space += 1;
        self.live.insert(space);
        space
    }

    /// Ends the space of weights that are gone: nothing stored in it is found again, and its unused blocks
    /// are freed.
    pub(crate) fn end_space(&mut self, space: Space) {
        self.live.remove(&space);
        let leaves = self.evictable.iter().map(|&(_, block)| block);
        let of_space = |&block: &BlockId| self.node(block).space == space;
        let mut unused: Vec<BlockId> = leaves.filter(of_space).collect();
        while let Some(block) = unused.pop() {
            // The blocks above it are of the same space.
            unused.extend(self.discard(block));
        }
    }
}

#[cfg(test)]
impl Blocks {
    /// Panics if a count or a link is wrong. `users` holds the blocks of each sequence with
    /// its tokens; nothing is pinned between passes.
    pub(crate) fn check<'a>(&self, users: impl Iterator<Item = (&'a [BlockId], &'a [TokenId])>) {
        let mut refs = vec![0u32; self.nodes.len()];
        for (chain, tokens) in users {
            let mut rest = tokens;
            for (i, &block) in chain.iter().enumerate() {
                refs[block as usize] += 1;
                let node = self.node(block);
                assert_eq!(node.ready, node.tokens.len(), "nothing is being computed");
                assert_eq!(node.tokens, rest[..node.tokens.len()], "another prefix");
                rest = &rest[node.tokens.len()..];
                match node.parent {
                    Parent::Block(above) => assert_eq!(chain[i - 1], above),
                    Parent::Root(_) => assert_eq!(i, 0),
                }
            }
            assert!(rest.is_empty(), "a computed token has no slot");
        }
        let (mut used, mut idle, mut evictable) = (0, 0, 0);
        for (block, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let id = block as BlockId;
            used += 1;
            assert_eq!(node.refs, refs[block], "block {block} has other users");
            let children = self.nodes.iter().flatten();
            let children = children.filter(|n| n.parent == Parent::Block(id)).count();
            assert_eq!(node.children as usize, children);
            assert!(children == 0 || node.tokens.len() == self.block_tokens);
            let siblings = &self.children[&(node.parent, node.first)];
            assert_eq!(siblings.iter().filter(|&&b| b == id).count(), 1);
            if node.refs > 0 {
                if let Parent::Block(above) = node.parent {
                    assert!(self.is_used(above), "an ancestor is unused");
                }
                continue;
            }
            idle += 1;
            assert_eq!(node.ready, node.tokens.len(), "a slot holds nothing");
            assert!(self.live.contains(&node.space), "an old block is kept");
            let leaf = self.evictable.contains(&(node.last_used, id));
            assert_eq!(leaf, children == 0);
            evictable += usize::from(leaf);
        }
        assert_eq!(self.idle, idle);
        assert_eq!(self.evictable.len(), evictable);
        assert_eq!(self.free.len() + used, self.nodes.len(), "a block is lost");
        let linked: usize = self.children.values().map(Vec::len).sum();
        assert_eq!(linked, used);
    }
}
