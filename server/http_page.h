// One page of text over HTTP, for whoever scrapes it.
#ifndef ATTENDANT_SERVER_HTTP_PAGE_H_
#define ATTENDANT_SERVER_HTTP_PAGE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

struct mg_context;
struct mg_connection;

namespace attendant::server {

// Serves until destruction, on two threads of its own. Thread-compatible.
class HttpPage {
 public:
  struct Page {
    std::string path;  // such as "/metrics"
    std::string content_type;
    std::function<std::string()> text;  // called on its thread for each request
  };

  // address: "host:port"; port 0 picks a free one. Whatever else is asked for gets 404, another
  // method than GET and HEAD 405. Returns UNAVAILABLE where the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<HttpPage>> Serve(const std::string& address, Page page);
  ~HttpPage();
  HttpPage(const HttpPage&) = delete;
  HttpPage& operator=(const HttpPage&) = delete;

  int port() const;

 private:
  explicit HttpPage(Page page);
  static int OnRequest(mg_connection* connection);
  std::string AnswerTo(const std::string& method, const std::string& path) const;

  const Page page_;
  mg_context* server_ = nullptr;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_HTTP_PAGE_H_
