use super::*;
use crate::format::{Enforced, Format, FormatLaw, Grammar};

fn node(parent: NodeId, kind: TokenKind, tokens: &[TokenId]) -> Node {
    let sampled = kind == TokenKind::Sampled;
    Node {
        logprobs: if sampled {
            vec![-0.5; tokens.len()]
        } else {
            Vec::new()
        },
        versions: if sampled {
            vec![VersionSpan {
                start: 0,
                len: tokens.len() as u32,
                version: PolicyVersion(3),
            }]
        } else {
            Vec::new()
        },
        ..Node::given(parent, 0, kind, tokens.to_vec(), Vec::new())
    }
}

fn trace(nodes: Vec<Node>) -> Trace {
    Trace {
        format_version: TRACE_FORMAT_VERSION,
        episode: EpisodeId::new("e"),
        group: GroupId::new("g"),
        task: TaskId::new("t"),
        task_kind: "k".into(),
        origin: Origin::default(),
        provenance: Provenance::default(),
        nodes,
        outcome: Outcome::default(),
        end: EpisodeEnd::Terminated,
        timing: Timing::default(),
        ignored: BTreeMap::new(),
    }
}

#[test]
fn branches_share_their_prefix() {
    let t = trace(vec![
        node(NO_PARENT, TokenKind::Prompt, &[1, 2]),
        node(0, TokenKind::Sampled, &[3]),
        node(0, TokenKind::Sampled, &[4, 5]),
        node(2, TokenKind::Observation, &[6]),
    ]);
    t.validate().unwrap();
    assert_eq!(t.leaves(), [1, 3]);
    let ids: Vec<_> = t.path_tokens(3).iter().map(|p| p.id).collect();
    assert_eq!(ids, [1, 2, 4, 5, 6]);
    assert_eq!(t.path_tokens(3)[2].version, Some(PolicyVersion(3)));
    assert_eq!(t.path_tokens(3)[4].version, None);
    assert_eq!(t.sampled_tokens(), 3);
}

#[test]
fn what_is_stored_without_a_temperature_was_sampled_at_one() {
    let mut warm = node(NO_PARENT, TokenKind::Sampled, &[1]);
    let plain = serde_json::to_value(&warm).unwrap();
    assert!(plain.get("temperature").is_none());
    assert_eq!(serde_json::from_value::<Node>(plain).unwrap(), warm);
    warm.temperature = 1.2;
    let told = serde_json::to_value(&warm).unwrap();
    assert_eq!(serde_json::from_value::<Node>(told).unwrap(), warm);
    assert_eq!(trace(vec![warm]).path_tokens(0)[0].temperature, 1.2);
}

fn held(allowed: &[u32]) -> Box<NodeFormat> {
    let n = allowed.len();
    Box::new(NodeFormat {
        law: FormatLaw {
            format: Format::new(Grammar::JsonObject).into(),
            enforced: Enforced::Masks {
                implementation: "i".into(),
                environment: "e".into(),
                format: "f".into(),
            },
        },
        allowed: allowed.to_vec(),
        masks: vec![u64::MAX; n],
        log_mass: vec![-0.25; n],
    })
}

#[test]
fn tokens_without_a_choice_are_forced() {
    let mut node = node(NO_PARENT, TokenKind::Sampled, &[1, 2, 3]);
    node.format = Some(held(&[7, 1, 2]));
    node.logprobs[1] = 0.0;
    let t = trace(vec![node]);
    t.validate().unwrap();
    let path = t.path_tokens(0);
    let kinds: Vec<_> = path.iter().map(|p| p.kind).collect();
    let (sampled, forced) = (TokenKind::Sampled, TokenKind::Forced);
    assert_eq!(kinds, [sampled, forced, sampled]);
    assert_eq!((path[1].logprob, path[1].version), (None, None));
    assert_eq!(path[2].version, Some(PolicyVersion(3)));
    assert_eq!(t.sampled_tokens(), 2);
    let text = serde_json::to_string(&t).unwrap();
    assert_eq!(serde_json::from_str::<Trace>(&text).unwrap(), t);
}

#[test]
fn a_format_that_does_not_fit_its_node_is_named() {
    let mut good = node(NO_PARENT, TokenKind::Sampled, &[1, 2]);
    good.format = Some(held(&[7, 2]));
    let refused = |field: &str, edit: &dyn Fn(&mut Trace)| {
        let mut t = trace(vec![good.clone()]);
        t.validate().unwrap();
        edit(&mut t);
        let error = t.validate().unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    };
    refused("allowed", &|t| t.nodes[0].format = Some(held(&[7])));
    refused("format.allowed [0] is 0", &|t| {
        t.nodes[0].format = Some(held(&[0, 2]))
    });
    refused("log-prob is -0.5", &|t| {
        t.nodes[0].format = Some(held(&[7, 1]))
    });
    refused("format version 2", &|t| t.format_version = 2);
    refused("log_mass", &|t| {
        let format = t.nodes[0].format.as_mut().unwrap();
        format.log_mass[0] = f32::NAN;
    });
    refused("kind Forced", &|t| {
        let node = &mut t.nodes[0];
        node.kind = TokenKind::Forced;
        (node.logprobs, node.versions) = (Vec::new(), Vec::new());
    });
}

#[test]
fn each_broken_invariant_is_named() {
    let mut t = trace(vec![node(NO_PARENT, TokenKind::Sampled, &[1, 2])]);
    t.nodes[0].logprobs.pop();
    assert!(matches!(t.validate(), Err(TraceError::Logprobs { .. })));
    t.nodes[0].logprobs = vec![-1.0, f32::NAN];
    assert!(matches!(
        t.validate(),
        Err(TraceError::LogprobValue { index: 1, .. })
    ));
    t.nodes[0].logprobs = vec![-1.0, -1.0];
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-4] {
        t.nodes[0].temperature = bad;
        let error = t.validate().unwrap_err();
        assert!(matches!(error, TraceError::Temperature { node: 0, .. }));
    }
    t.nodes[0].temperature = 0.7;
    t.validate().unwrap();
    t.nodes[0].kind = TokenKind::Forced;
    (t.nodes[0].logprobs, t.nodes[0].versions) = (Vec::new(), Vec::new());
    let error = t.validate().unwrap_err();
    assert!(matches!(error, TraceError::Temperature { .. }), "{error}");
    t = trace(vec![node(NO_PARENT, TokenKind::Sampled, &[1, 2])]);
    t.nodes[0].versions[0].len = 1;
    assert!(matches!(t.validate(), Err(TraceError::Versions { .. })));
    t.nodes[0].versions[0].len = 2;
    t.nodes[0].parent = 0;
    assert!(matches!(t.validate(), Err(TraceError::Parent { .. })));
}

/// One layer of one expert for each token.
fn span(start: u32, experts: &[u8]) -> RouteSpan {
    RouteSpan {
        start,
        layers: 1,
        top_k: 1,
        wide: false,
        experts: experts.into(),
    }
}

#[test]
fn experts_belong_to_the_tokens_of_a_path() {
    let mut first = node(0, TokenKind::Sampled, &[3, 4]);
    first.routes = vec![span(0, &[1, 2, 3])];
    let mut second = node(2, TokenKind::Sampled, &[6]);
    second.routes = vec![span(3, &[4, 5])];
    let t = trace(vec![
        node(NO_PARENT, TokenKind::Prompt, &[1, 2]),
        first,
        node(1, TokenKind::Observation, &[5]),
        second,
        node(0, TokenKind::Sampled, &[7]),
    ]);
    t.validate().unwrap();
    assert_eq!(t.path_routes(3), [span(0, &[1, 2, 3]), span(3, &[4, 5])]);
    assert_eq!(RouteSpan::known(&t.path_routes(3)), 5);
    assert!(t.path_routes(4).is_empty());
    let text = serde_json::to_string(&t).unwrap();
    assert_eq!(serde_json::from_str::<Trace>(&text).unwrap(), t);
    let refused = |words: &str, edit: &dyn Fn(&mut Trace)| {
        let mut t = t.clone();
        edit(&mut t);
        let error = t.validate().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused("node 3: routes end at token 7, its path has 6", &|t| {
        t.nodes[3].routes.push(span(5, &[1, 2]));
    });
    refused("node 0: routes are set on a node of kind Prompt", &|t| {
        t.nodes[0].routes.push(span(0, &[1]));
    });
    refused("node 1: routes have 0 bytes", &|t| {
        t.nodes[1].routes[0].experts = [].into();
    });
}
