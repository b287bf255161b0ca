#include "server/http_page.h"

#include <civetweb.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace attendant::server {
namespace {

std::string Answer(const char* status, const std::string& content_type, const std::string& body,
                   bool with_body) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", content_type,
                      "\r\nContent-Length: ", body.size(),
                      "\r\nAllow: GET, HEAD\r\nConnection: close\r\n\r\n", with_body ? body : "");
}

}  // namespace

HttpPage::HttpPage(Page page) : page_(std::move(page)) {}

absl::StatusOr<std::unique_ptr<HttpPage>> HttpPage::Serve(const std::string& address, Page page) {
  std::unique_ptr<HttpPage> served(new HttpPage(std::move(page)));
  const char* const options[] = {"listening_ports", address.c_str(), "num_threads", "1",
                                 // Whoever sends nothing keeps the thread from others.
                                 "request_timeout_ms", "5000", nullptr};
  // Before anything else that civetweb does with a request: its own error pages need more stack
  // than its threads have.
  mg_callbacks callbacks{};
  callbacks.begin_request = &HttpPage::OnRequest;
  served->server_ = mg_start(&callbacks, served.get(), const_cast<const char**>(options));
  if (served->server_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot serve HTTP on ", address));
  }
  return served;
}

HttpPage::~HttpPage() {
  if (server_ != nullptr) mg_stop(server_);
}

int HttpPage::port() const {
  mg_server_port port{};
  return mg_get_server_ports(server_, 1, &port) == 1 ? port.port : 0;
}

int HttpPage::OnRequest(mg_connection* connection) {
  const mg_request_info* const request = mg_get_request_info(connection);
  const std::string answer =
      static_cast<const HttpPage*>(request->user_data)
          ->AnswerTo(request->request_method,
                     request->local_uri == nullptr ? "" : request->local_uri);
  mg_write(connection, answer.data(), answer.size());
  return 1;  // handled
}

std::string HttpPage::AnswerTo(const std::string& method, const std::string& path) const {
  const std::string plain = "text/plain; charset=utf-8";
  const bool get = method == "GET";
  if (!get && method != "HEAD") {
    return Answer("405 Method Not Allowed", plain, "GET and HEAD are served\n", true);
  }
  if (path != page_.path && path != page_.path + "/") {
    return Answer("404 Not Found", plain, absl::StrCat("the page is ", page_.path, "\n"), get);
  }
  return Answer("200 OK", page_.content_type, page_.text(), get);
}

}  // namespace attendant::server
