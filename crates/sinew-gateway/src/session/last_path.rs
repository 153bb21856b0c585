//! Cache of the token ids from the root to a node. The next prompt usually continues the last one, so that
//! building and hashing it costs only the new tokens.

use crate::keys::{Key, TokenHasher};
use sinew_types::{Node, NodeId, TokenId};

/// The path of a node. Nodes are only added and never changed, so the cached path stays valid.
#[derive(Clone, Debug, Default)]
pub(super) struct LastPath {
    /// Last node of the path; `None` before any root.
    node: Option<NodeId>,
    /// Token ids from the root to this node.
    ids: Vec<TokenId>,
    /// Hasher over `ids`, so that extending the path costs only its new tokens.
    hasher: TokenHasher,
}

impl LastPath {
    /// Moves the path to `to`. If the present node is an ancestor of `to`, the cost is the length of the path
    /// between them; otherwise it is that of the whole path.
    pub(super) fn go(&mut self, nodes: &[Node], to: Option<NodeId>) {
        let mut missing = Vec::new();
        let mut at = to.filter(|&id| (id as usize) < nodes.len());
        while at != self.node
            && let Some(node) = at.and_then(|id| nodes.get(id as usize))
        {
            missing.push(node);
            at = Some(node.parent).filter(|&id| (id as usize) < nodes.len());
        }
        if at != self.node {
            self.ids.clear();
            self.hasher = TokenHasher::default();
        }
        let new = missing.iter().map(|n| n.tokens.len()).sum();
        self.ids.reserve(new);
        for node in missing.iter().rev() {
            self.ids.extend_from_slice(&node.tokens);
            self.hasher.push(&node.tokens);
        }
        self.node = to;
    }

    /// Token ids of the path.
    pub(super) fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Returns the hash of the path followed by `more`.
    pub(super) fn key_with(&self, more: &[&[TokenId]]) -> Key {
        let mut hasher = self.hasher.clone();
        more.iter().for_each(|ids| hasher.push(ids));
        hasher.key()
    }

    /// Returns the hash of the path.
    pub(super) fn key(&self) -> Key {
        self.hasher.key()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys;
    use proptest::prelude::*;
    use sinew_types::{NO_PARENT, TokenKind};

    proptest! {
        /// Wherever it goes from wherever it was, it is the path.
        #[test]
        fn it_is_the_path_of_where_it_is(
            parents in prop::collection::vec(0u32..8, 1..24),
            ways in prop::collection::vec(0u32..30, 1..24),
        ) {
            let nodes: Vec<Node> = parents.iter().enumerate().map(|(i, &back)| {
                let parent = (i as u32).checked_sub(back + 1).unwrap_or(NO_PARENT);
                let tokens = vec![i as TokenId; i % 4];
                Node::given(parent, 0, TokenKind::Prompt, tokens, Vec::new())
            }).collect();
            let mut path_so_far = LastPath::default();
            for way in ways {
                let to = Some(way).filter(|&n| (n as usize) < nodes.len());
                path_so_far.go(&nodes, to);
                let mut path = Vec::new();
                let mut at = to.and_then(|n| nodes.get(n as usize));
                while let Some(node) = at {
                    path.splice(0..0, node.tokens.iter().copied());
                    at = nodes.get(node.parent as usize);
                }
                prop_assert_eq!(path_so_far.ids(), path.as_slice());
                prop_assert_eq!(path_so_far.key(), keys::tokens(&path));
                let more = [path.as_slice(), &[7]].concat();
                prop_assert_eq!(path_so_far.key_with(&[&[], &[7]]), keys::tokens(&more));
            }
        }
    }
}
