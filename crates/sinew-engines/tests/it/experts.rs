//! Experts that a server of a mixture-of-experts model reports.

use crate::mock::{Fault, Kind, Mock};
use crate::support::{config, remote, request, submit, vllm};
use sinew_engines::VllmApi;
use sinew_types::{Engine, EngineEvent, GenerateRequest, RouteSpan};

/// The experts that come with the end of a request.
fn routes(engine: &dyn Engine, request: GenerateRequest) -> Option<RouteSpan> {
    let pending = submit(engine, request);
    loop {
        match pending.next() {
            EngineEvent::Finished { routes, .. } => return routes,
            EngineEvent::Failed { error, .. } => panic!("{error}"),
            EngineEvent::Tokens { .. } | EngineEvent::Prompt { .. } => {}
        }
    }
}

fn asked(id: u64, routes_from: Option<u32>) -> GenerateRequest {
    let mut request = request(id, &[1, 2, 3], 4);
    request.sampling.stop_ids.clear();
    request.sampling.routes_from = routes_from;
    request
}

/// Also of tokens that an attempt sampled which was cut: the next one computes them as its prompt.
#[test]
fn experts_of_prompt_and_output_come_with_the_end() {
    let mock = Mock::start(Kind::Vllm);
    let engine = remote(vec![vllm(&mock, VllmApi::Generate)], config());
    assert_eq!(routes(&engine, asked(1, None)), None);
    for (id, fault) in [(2, None), (3, Some(Fault::CutAfter(2)))] {
        fault.into_iter().for_each(|fault| mock.fail_next(fault));
        let span = routes(&engine, asked(id, Some(1))).unwrap();
        // The last of 7 tokens was never an input.
        assert_eq!(
            (span.start, span.end(), span.shape()),
            (1, 6, (2, 1, false))
        );
        assert_eq!(span.at(5), Some(&[5, 0][..]));
    }
    let seen = mock.state.seen.lock().unwrap();
    let field =
        |body: &serde_json::Value| body["sampling_params"]["routed_experts_prompt_start"].as_u64();
    let starts: Vec<Option<u64>> = seen.iter().map(field).collect();
    assert_eq!(starts, [None, Some(1), Some(1), Some(1)]);
}

/// `/v1/completions` reports none in a stream.
#[test]
fn the_endpoint_of_completions_is_not_asked() {
    let mock = Mock::start(Kind::Vllm);
    let engine = remote(vec![vllm(&mock, VllmApi::Completions)], config());
    assert_eq!(routes(&engine, asked(1, Some(0))), None);
}
